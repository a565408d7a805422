"""Meshes: ranks and coordinates are each other's inverse, and errors say what does not multiply out."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st

from dovetail.dispatch import Mesh
from dovetail.errors import DispatchError

AXES = ("dp", "tp", "pp", "cp", "ep")


@st.composite
def meshes(draw) -> Mesh:
    axes = draw(st.permutations(AXES))[: draw(st.integers(0, 5))]
    return Mesh({axis: draw(st.integers(1, 3)) for axis in axes})


@given(meshes())
def test_rank_and_coordinates_are_inverse(mesh):
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(
        range(mesh.size)
    )
    places = {tuple(mesh.coordinates(rank).items()) for rank in range(mesh.size)}
    assert len(places) == mesh.size


@given(meshes(), st.lists(st.sampled_from(AXES), unique=True))
def test_groups_divide_the_ranks_by_their_other_coordinates(mesh, axes):
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    fixed = set()
    for group in groups:
        others = {
            tuple((a, at) for a, at in mesh.coordinates(rank).items() if a not in axes)
            for rank in group
        }
        assert len(others) == 1
        fixed |= others
        assert group == sorted(group)
    assert len(fixed) == len(groups)


def test_the_order_of_axes_fixes_the_order_of_ranks():
    tp_inner, dp_inner = Mesh(dp=2, tp=3), Mesh({"tp": 3, "dp": 2})
    assert tp_inner.groups("tp") == [[0, 1, 2], [3, 4, 5]]
    assert dp_inner.groups("tp") == [[0, 2, 4], [1, 3, 5]]
    assert tp_inner.coordinates(4) == {"dp": 1, "tp": 1, "pp": 0, "cp": 0, "ep": 0}
    assert tp_inner.rank(dp=1, tp=1) == 4
    assert tp_inner != dp_inner
    assert tp_inner == Mesh({"dp": 2, "tp": 3})
    assert len({tp_inner, dp_inner, Mesh(dp=2, tp=3)}) == 2


def test_absent_axes_have_size_one():
    mesh = Mesh()
    assert mesh.size == 1
    assert mesh.axes == dict.fromkeys(AXES, 1)
    assert mesh.axis_size("cp") == 1
    assert mesh.coordinates(0) == dict.fromkeys(AXES, 0)
    assert repr(Mesh(dp=2, tp=4, name="infer")) == "Mesh(dp=2 × tp=4, name='infer')"


def test_a_mesh_travels():
    mesh = Mesh({"tp": 2, "dp": 3}, name="infer")
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert again.coordinates(4) == mesh.coordinates(4)


def test_dp_takes_what_the_other_axes_leave():
    assert Mesh.over(8, tp=2, pp=2).axes["dp"] == 2
    assert Mesh.over(8, tp=2).groups("tp")[0] == [0, 1]
    assert Mesh.over(4, dp=2, tp=2).size == 4
    with pytest.raises(DispatchError, match=r"8 workers .*tp=3.*: 8 / 3 leaves 2"):
        Mesh.over(8, tp=3)
    with pytest.raises(DispatchError, match=r"dp=2 × tp=2 is 4; expected 6"):
        Mesh.over(6, dp=2, tp=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(tq=2), "no axis 'tq'; its.*cp, ep\n.*did you mean 'tp'"),
        (lambda: Mesh(dp=0), "axis 'dp' must.*integer ≥ 1, not 0"),
        (lambda: Mesh(dp="2"), "axis 'dp' must.*integer ≥ 1, not '2'"),
        (lambda: Mesh(dp=True), "axis 'dp' must.*integer ≥ 1, not True"),
        (lambda: Mesh({"dp": 2}, dp=2), "'dp' is given twice"),
        (lambda: Mesh(dp=2).rank(dp=2), "dp=2 is.*mesh .*dp goes from 0 to 1"),
        (lambda: Mesh(dp=2).coordinates(2), "rank 2 is.*mesh .*ranks are 0 … 1"),
        (lambda: Mesh().groups("xp"), "no axis 'xp'"),
    ],
)
def test_what_makes_no_mesh_is_refused(make, message):
    with pytest.raises(DispatchError, match=message):
        make()
