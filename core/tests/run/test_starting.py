"""Training models and rollout start one after the other, or at the same time where the engine's config allows it."""

from __future__ import annotations

import errno
import fcntl
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.errors import ModelError, RolloutError
from dovetail.interfaces import SourcePlacement
from dovetail.run.starting import start_roles, starts_at_once
from dovetail.sections import Pool
from dovetail.workers import turn_path

TOGETHER = (Pool(name="all", roles=("actor", "rollout")),)
APART = (Pool(name="train", roles=("actor",)), Pool(name="generate", roles=("rollout",)))


LOGGER = logging.getLogger("starting")


def case(
    *,
    beside: bool = True,
    in_process: bool = True,
    pools: Any = TOGETHER,
    module: str = "no_such_module",
) -> Any:
    placement = SimpleNamespace(
        source=SourcePlacement(beside=beside, imports=(module,)),
        in_process=in_process,
        pool=lambda role: next(pool for pool in pools if role in pool.roles),
    )
    return SimpleNamespace(placement=placement)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"beside": False}, False),
        ({"in_process": False}, False),
        ({"in_process": False, "pools": APART}, True),
    ],
)
def test_they_start_at_once_where_they_take_turns_or_share_no_accelerator(
    settings: dict[str, Any], expected: bool
) -> None:
    assert starts_at_once(case(**settings)) is expected


def test_one_after_the_other_the_training_models_come_first(tmp_path: Path) -> None:
    order: list[str] = []
    start_roles(
        case(beside=False),
        tmp_path,
        train=lambda: order.append("train"),
        generate=lambda: order.append("generate"),
        logger=LOGGER,
    )
    assert order == ["train", "generate"]


def test_at_once_both_are_under_way_and_training_models_have_the_turn(tmp_path: Path) -> None:
    met = threading.Barrier(2)

    def train() -> str:
        met.wait(120)
        assert turn_path(tmp_path).exists()
        return "groups"

    def generate() -> str:
        met.wait(120)
        return "replicas"

    found = start_roles(case(), tmp_path, train=train, generate=generate, logger=LOGGER)
    assert found == ("groups", "replicas")
    assert not turn_path(tmp_path).exists()


def test_when_training_models_fail_the_rollout_gets_its_turn_and_is_waited_for(
    tmp_path: Path,
) -> None:
    failed, done = threading.Event(), threading.Event()

    def train() -> None:
        failed.set()
        raise ModelError("no such model")

    def generate() -> None:
        assert failed.wait(120)
        while turn_path(tmp_path).exists():
            pass
        done.set()

    with pytest.raises(ModelError, match="no such model"):
        start_roles(case(), tmp_path, train=train, generate=generate, logger=LOGGER)
    assert done.is_set()


def test_when_the_rollout_fails_its_error_comes_once_the_training_models_are_there(
    tmp_path: Path,
) -> None:
    failed, loaded = threading.Event(), threading.Event()

    def train() -> None:
        assert failed.wait(120)
        loaded.set()

    def generate() -> None:
        failed.set()
        raise RolloutError("too little memory")

    with pytest.raises(RolloutError, match="too little memory"):
        start_roles(case(), tmp_path, train=train, generate=generate, logger=LOGGER)
    assert loaded.is_set()


def test_where_both_fail_the_training_models_error_is_told(tmp_path: Path) -> None:
    def train() -> None:
        raise ModelError("no such model")

    def generate() -> None:
        raise RolloutError("too little memory")

    with pytest.raises(ModelError):
        start_roles(case(), tmp_path, train=train, generate=generate, logger=LOGGER)


@pytest.mark.parametrize("when", ["while models load", "afterwards"])
def test_an_error_or_a_ctrl_c_that_waits_for_the_rollouts_start_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    told, lines = threading.Event(), []

    def warning(line: str) -> None:
        lines.append(line)
        told.set()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if when == "afterwards":
        monkeypatch.setattr(Future, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_roles(
            case(),
            tmp_path,
            train=interrupt if when == "while models load" else list,
            generate=lambda: told.wait(120),
            logger=SimpleNamespace(warning=warning),
        )
    assert lines == ["KeyboardInterrupt: closing the rollout once it has started"]


def test_an_engine_that_can_not_be_imported_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_engine.py").write_text("raise RuntimeError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)

    def generate() -> None:
        raise RolloutError("the engine is broken")

    with pytest.raises(RolloutError, match="engine is broken"):
        start_roles(
            case(module="broken_engine"), tmp_path, train=list, generate=generate, logger=LOGGER
        )


def test_without_locks_they_start_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    here = threading.current_thread()
    threads: list[threading.Thread] = []

    def start() -> None:
        threads.append(threading.current_thread())

    start_roles(case(), tmp_path, train=start, generate=start, logger=LOGGER)
    assert threads == [here, here]
    assert [f"{tmp_path} has no locks" in line for line in caplog.messages] == [True]
