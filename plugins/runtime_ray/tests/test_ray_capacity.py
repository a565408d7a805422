"""Whether pools fit the nodes of a cluster is checked, and reported in numbers, before any process waits."""

from __future__ import annotations

import pytest

from dovetail.errors import PlacementError
from dovetail.sections import Pool
from dovetail_runtime_ray.capacity import Node, fit, shares


def node(name: str, *, gpus: float = 8, cpus: float = 64, free_gpus: float | None = None) -> Node:
    free = gpus if free_gpus is None else free_gpus
    return Node(
        node_id=name,
        address=f"10.0.0.{len(name)}",
        host=name,
        total={"GPU": gpus, "CPU": cpus},
        free={"GPU": free, "CPU": cpus},
    )


def gpu_pool(name: str, ranks: int, nodes: int = 1) -> Pool:
    return Pool(name=name, roles=("actor",), nodes=nodes, ranks_per_node=ranks, accelerators=True)


def test_nodes_of_one_pool_are_different_machines() -> None:
    nodes = [node("a"), node("b")]
    assert {n.node_id for n in fit(shares([gpu_pool("x", 4, nodes=2)], None), nodes)} == {"a", "b"}


def test_pools_share_a_machine_where_they_fit_and_leave_no_hole_too_small() -> None:
    nodes = [node("a"), node("b", free_gpus=2)]
    wanted = shares([gpu_pool("small", 2), gpu_pool("large", 8)], None)
    assert [n.node_id for n in fit(wanted, nodes)] == ["b", "a"]
    wanted = shares([gpu_pool("train", 6), gpu_pool("generate", 2)], None)
    assert [n.node_id for n in fit(wanted, [node("a"), node("b")])] == ["a", "a"]


def test_pools_on_cpus_keep_away_from_accelerators() -> None:
    wanted = shares([Pool(name="x", roles=("ref",), ranks_per_node=4)], 2)
    assert [n.node_id for n in fit(wanted, [node("a"), node("b", gpus=0)])] == ["b"]


@pytest.mark.parametrize(
    ("pool", "cpus", "said"),
    [
        (gpu_pool("x", 9), None, "9 GPUs.*runtime.gpus_per_node .* 8"),
        (gpu_pool("x", 8, nodes=3), None, "3 nodes × 8 accelerators.*runtime.nodes .* 2"),
        (gpu_pool("x", 8, nodes=2), None, "a .*8 of 8 GPUs.*; bb .*2 of 8 GPUs.*wait until"),
        (gpu_pool("x", 8), 9, "72 CPUs.*runtime.workers_per_node .*runtime.cpus_per_worker"),
    ],
)
def test_what_does_not_fit_is_said_with_what_is_free(
    pool: Pool, cpus: int | None, said: str
) -> None:
    nodes = [node("a"), node("bb", free_gpus=2)]
    with pytest.raises(PlacementError, match=f"(?s)the cluster lacks.*{said}"):
        fit(shares([pool], cpus), nodes)


def test_a_cluster_without_accelerators_says_so() -> None:
    with pytest.raises(PlacementError, match="no GPU on any node"):
        fit(shares([gpu_pool("x", 1)], None), [node("a", gpus=0)])
