"""Servers that are killed or stopped while they generate or receive weights: requests fail with a clear error in bounded time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dovetail.errors import RolloutError, WeightSyncError
from dovetail_rollout_sglang.backend import SglangBackend
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_sdk.testing.conformance.rollout.interrupting import collected
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.replicas import send_weights
from dovetail_sdk.testing.transport_ends import manifest_of

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.sglang,
    pytest.mark.usefixtures("stand_ins"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(SGLANG.installed() is None, reason="SGLang is not installed here"),
]

DOOR, SCHEDULER = "the server", "its scheduler"


def generating(engine: SglangRollout, asking: Any, harm: Callable[[], None]) -> RolloutError:
    """The error of a request in whose middle harm is done."""

    async def act() -> Any:
        request = asking(max_new_tokens=2000)
        work = asyncio.create_task(collected(engine, request))
        while engine._gate.running < request.n:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)  # until the scheduler has received the requests
        harm()
        return await asyncio.gather(work, return_exceptions=True)

    (error,) = asyncio.run(act())
    assert isinstance(error, RolloutError), error
    return error


def receiving(
    engine: SglangRollout, plain: PlainModel, harm: Callable[[], None]
) -> WeightSyncError:
    """The error of an update in whose middle harm is done."""
    weights = plain.weights()

    def with_harm() -> Iterator[tuple[str, Tensor]]:
        for number, named in enumerate(weights.items()):
            if number == len(weights) // 2:
                time.sleep(0.5)  # the earlier tensors are loaded meanwhile
                harm()
            yield named

    transport = engine.context.transport
    assert transport is not None
    sender = transport.sender()
    manifest = manifest_of(weights, 1, bucket_bytes=4096)
    try:
        with pytest.raises(WeightSyncError) as found:
            send_weights(engine, sender, manifest, with_harm())
    finally:
        sender.close()
    return found.value


def to(process: str, number: signal.Signals, engine: SglangRollout) -> Callable[[], None]:
    """Sends a signal to one of a server's processes."""

    def harm() -> None:
        for pid in pids(engine, process):
            os.kill(pid, number)

    return harm


def pids(engine: SglangRollout, which: str) -> list[int]:
    backend = engine.backend
    assert isinstance(backend, SglangBackend)
    assert backend._own is not None
    (guard,) = children(backend._own._process._guard.pid)
    (door,) = children(guard)
    if which == DOOR:
        return [door]
    found = [pid for pid in children(door) if "scheduler" in name_of(pid)]
    assert found, [name_of(pid) for pid in children(door)]
    return found


def children(pid: int) -> list[int]:
    """Processes that a process has started, in whichever of its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def assert_says_what_it_printed(error: RolloutError | WeightSyncError, how: str) -> None:
    assert "the server at http://127.0.0.1:" in error.message
    assert how in error.message
    assert "sglang.log:\n" in error.message


def test_a_killed_server_ends_what_it_did_and_its_replica_starts_again(
    started: Any, asking: Any, tiny: Path
) -> None:
    engine = started()
    try:
        error = generating(engine, asking, to(SCHEDULER, signal.SIGKILL, engine))
        assert_says_what_it_printed(error, "")
        assert not engine.alive()
        engine.close()
        engine.start()
        (sample,) = asyncio.run(collected(engine, asking(n=1)))
        assert len(sample.response_ids) == 8
        log = engine.backend._own.log
        update = receiving(engine, PlainModel.of(tiny), to(DOOR, signal.SIGKILL, engine))
        assert_says_what_it_printed(update, "ended with status 137")
        assert not engine.alive()
        assert log.is_file()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("process", "how"),
    [
        (DOOR, "has answered no health check for 8 s"),
        (SCHEDULER, "reports that its engine has died"),
    ],
)
@pytest.mark.parametrize("during", ["generation", "an update"])
def test_a_server_that_stands_still_ends_what_it_did(
    started: Any,
    asking: Any,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: str,
    how: str,
    during: str,
) -> None:
    if process == DOOR:
        monkeypatch.setattr(SglangBackend, "patience", 8.0)
    engine = started()
    try:
        harm = to(process, signal.SIGSTOP, engine)
        error: RolloutError | WeightSyncError
        if during == "generation":
            error = generating(engine, asking, harm)
        else:
            error = receiving(engine, PlainModel.of(tiny), harm)
        assert_says_what_it_printed(error, how)
        assert not engine.alive()
    finally:
        engine.close()
