"""Dispatch modes are declared once, on the interface; an override inherits, and re-decoration is refused."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from dovetail.dispatch import (
    Dispatch,
    Mesh,
    ModeSpec,
    Worker,
    nd,
    register,
)
from dovetail.dispatch.registration import registered_methods
from dovetail.errors import DispatchError
from dovetail.interfaces import PluginContext, TrainEngine


class Engine(Worker, ABC):
    @register(dispatch_mode=nd("train"))
    @abstractmethod
    def forward(self, batch): ...

    @abstractmethod
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def version(self): ...

    def helper(self): ...


class Mine(Engine):
    def forward(self, batch):
        return batch

    def version(self):
        return 3


def test_an_override_inherits_its_mode():
    assert registered_methods(Mine) == {"forward": nd("train"), "version": Dispatch.RANK_ZERO}
    assert not hasattr(vars(Mine)["forward"], "__dovetail_dispatch__")


def test_the_same_mode_may_be_repeated():
    class Again(Engine):
        @register(dispatch_mode=nd("train"))
        def forward(self, batch):
            return batch

    assert registered_methods(Again)["forward"] == nd("train")


def test_another_mode_is_refused_when_the_class_is_made():
    with pytest.raises(
        DispatchError,
        match=r"Other\.forward is registered as one_to_all\(\), but .*Engine\.forward as nd\(",
    ) as caught:

        class Other(Engine):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def forward(self, batch):
                return batch

    assert "an override inherits" in str(caught.value)


def test_another_mode_is_refused_however_far_up_it_was_declared():
    with pytest.raises(DispatchError, match=r"Other\.forward is registered"):

        class Other(Mine):
            @register(dispatch_mode=nd("train", unit="group"))
            def forward(self, batch):
                return batch


def test_bases_that_disagree_do_not_combine():
    class Mixin:
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def version(self):
            return 1

    with pytest.raises(DispatchError, match=r"Mixin\.version is registered|version as"):

        class Both(Mixin, Engine):
            pass


def test_one_function_has_one_mode():
    with pytest.raises(DispatchError, match=r"registered twice, as rank_zero.. and as one_to_all"):

        class Two(Worker):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            @register(dispatch_mode=Dispatch.RANK_ZERO)
            def forward(self): ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nd("train", split=("dq",)), "no axis 'dq'.*\n.*'dp'"),
        (lambda: nd("train", split=("dp", "dp")), "axis twice"),
        (lambda: nd("train", unit="row"), "unit='row'.* one of sample,.*group"),
        (lambda: register(dispatch_mode="nd"), "'nd'.* is not a dispatch mode\n.*ModeSpec.of"),
        (lambda: register(dispatch_mode=Dispatch.RANK_ZERO)(3), "a method, not 3"),
    ],
)
def test_declarations_that_make_no_sense_are_refused(make, message):
    with pytest.raises(DispatchError, match=message):
        make()


def test_a_plugin_declares_a_mode_of_its_own():
    mode = ModeSpec.of("ring", hops=2, axis="cp")
    assert mode == ModeSpec.of("ring", axis="cp", hops=2)
    assert str(mode) == "ring(axis='cp', hops=2)"


def test_a_train_engine_is_registered_as_the_interface_says():
    modes = registered_methods(TrainEngine)
    assert modes["forward"] == modes["update"] == nd("train")
    assert modes["weight_manifest"] == Dispatch.RANK_ZERO
    assert {
        modes[name] for name in ("send_weights", "save", "load", "export", "offload", "onload")
    } == {Dispatch.ONE_TO_ALL}


def test_a_worker_knows_its_place_from_its_context():
    worker = Mine()
    with pytest.raises(DispatchError, match=r"Mine has no context.*\n.*super\(\)\.__init__"):
        _ = worker.rank
    worker.context = PluginContext(mesh=Mesh(dp=2, tp=2), rank=3)
    assert (worker.rank, worker.mesh.size) == (3, 4)
    assert worker.coordinates == {"dp": 1, "tp": 1, "pp": 0, "cp": 0, "ep": 0}
    worker.context = PluginContext()
    assert (worker.rank, worker.mesh) == (0, Mesh())
