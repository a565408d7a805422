"""Roles that are offloaded between their phases: who is on the accelerator when."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from dovetail.dispatch import Future
from dovetail.workers.offload import OffloadManager


class Group:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def offload(self) -> Future[Any]:
        self.log.append(f"{self.name} goes")
        return Future.completed(None)

    def onload(self) -> Future[Any]:
        self.log.append(f"{self.name} comes")
        return Future.completed(None)

    def free_cache(self) -> Future[Any]:
        self.log.append(f"{self.name} gives back")
        return Future.completed(None)


def offload_manager(
    *, generates: bool = True, **offloaded: bool
) -> tuple[OffloadManager, list[str]]:
    log: list[str] = []
    every = {role: Group(role, log) for role in offloaded}
    groups = {role: group for role, group in every.items() if offloaded[role]}
    made = OffloadManager(groups, lambda _: nullcontext(), generates=generates, models=every)
    return made, log


def test_nobody_moves_unless_asked_to() -> None:
    kept, log = offload_manager()
    kept.settle()
    with kept.present("actor"), kept.present("ref"), kept.present("critic"):
        pass
    assert log == []


def test_the_actor_stays_from_its_first_pass_to_the_next_rollout() -> None:
    kept, log = offload_manager(actor=True)
    kept.settle()
    kept.settle()
    with kept.present("actor"):
        assert log == ["actor goes", "actor comes"]
    with kept.present("actor"):
        pass
    kept.settle()
    assert log == ["actor goes", "actor comes", "actor goes"]


def test_a_reference_leaves_as_soon_as_it_has_scored() -> None:
    kept, log = offload_manager(ref=True)
    kept.settle()
    with kept.present("ref"):
        pass
    with kept.present("actor"):
        pass
    kept.settle()
    assert log == ["ref goes", "ref comes", "ref goes"]


def test_without_a_rollout_the_actor_leaves_while_others_compute() -> None:
    kept, log = offload_manager(actor=True, ref=True, generates=False)
    for _ in range(2):
        for roles in [("ref",), (), ("actor",), ("actor",), ("actor", "ref")]:
            with kept.present(*roles):
                log.append("+".join(roles))
    first = ["actor goes", "ref", "ref goes", "", "actor comes", "actor", "actor"]
    together = ["ref comes", "actor+ref", "ref goes"]
    assert log == [*first, *together, "actor goes", "ref comes", *first[1:], *together]


def test_an_actor_that_computes_alone_does_not_move() -> None:
    kept, log = offload_manager(actor=True, generates=False)
    for _ in range(2):
        with kept.present("actor"):
            pass
    assert log == []


def test_models_that_stay_give_back_what_they_hold_unused() -> None:
    kept, log = offload_manager(actor=False, ref=True)
    with kept.present("ref"):
        pass
    with kept.present("actor"):
        pass
    kept.settle()
    assert log == ["ref goes"]
    kept.free_caches()
    assert log == ["ref goes", "actor gives back"]


def test_an_actor_that_is_offloaded_gives_back_while_it_sends_its_weights() -> None:
    kept, log = offload_manager(actor=True)
    kept.settle()
    with kept.present("actor"):
        kept.free_caches()
    kept.settle()
    kept.free_caches()
    assert log == ["actor goes", "actor comes", "actor gives back", "actor goes"]
