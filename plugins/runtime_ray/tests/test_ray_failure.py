"""Errors of ranks that fail, hang or die, and the end of all other calls. Real processes are killed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest

from dovetail.errors import NumericsError, PlacementError, WorkerError


def ended(pid: int, within: float = 120.0) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_one_failing_rank_does_not_leave_the_others_in_a_collective(
    probes: Any, start: Any
) -> None:
    runtime = start(probes.pool("actor", "ref", ranks=2), failure_grace=1.0)
    actor, ref = probes.group(runtime, "actor"), probes.group(runtime, "ref")
    pids = [where["pid"] for where in actor.where().result()]
    with pytest.raises(NumericsError, match="not finite"):
        actor.fail("numerics", (1,), others="collective").result()
    (event, _) = runtime.context.logger.events[-1]
    assert "actor.fail() failed on rank 1; ranks [0] continued for 1 seconds" in event
    assert "probe_engine.py" in event  # where rank 0 hung
    assert all(ended(pid) for pid in pids)
    with pytest.raises(
        WorkerError, match=r"ref.where\(\) was abandoned.*actor.fail\(\) failed on rank 1"
    ):
        ref.where()


def test_a_call_past_its_limit_names_the_silent_ranks_and_what_they_do(
    probes: Any, start: Any, tmp_path: Path
) -> None:
    runtime = start(probes.pool("actor", ranks=2), run_directory=tmp_path, time_limit=6.0)
    actor = probes.group(runtime)
    with pytest.raises(
        WorkerError, match=r"actor.fail\(\): ranks \[1\] of 2 gave.*within 6 seconds"
    ) as caught:
        actor.fail("hang", (1,)).result()
    assert "raise runtime.time_limit if" in str(caught.value)
    stacks = (tmp_path / "logs" / "stacks-fail.txt").read_text()
    assert "_sleep_for_long" in stacks
    assert str(tmp_path / "logs" / "stacks-fail.txt") in str(caught.value)


def test_a_stopped_process_is_told_from_the_rank_that_waits_for_it(
    probes: Any, start: Any, tmp_path: Path
) -> None:
    runtime = start(probes.pool("actor", ranks=2), run_directory=tmp_path, time_limit=6.0)
    actor = probes.group(runtime)
    pids = [where["pid"] for where in actor.where().result()]
    os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError) as caught:
            actor.fail("none", (), others="collective").result()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGCONT)
    message = str(caught.value)
    assert "ranks [0, 1] of 2 gave no answer" in message
    assert f"rank 1 (pid {pids[1]} on" in message
    assert "rank 0 (" not in message
    assert caught.value.rank == 1


@pytest.mark.parametrize("how", ["killed", pytest.param("exit", marks=pytest.mark.nightly)])
def test_a_process_that_dies_in_a_call_is_named(probes: Any, start: Any, how: str) -> None:
    runtime = start(probes.pool("actor", ranks=2))
    actor = probes.group(runtime)
    pids = [where["pid"] for where in actor.where().result()]
    with pytest.raises(WorkerError) as caught:
        # Rank 0 loses its peer in the collective, and may fail first, but is not the cause.
        actor.fail(how, (1,), others="collective").result()
    message = str(caught.value)
    assert f"actor rank 1 of 2 (pid {pids[1]} on" in message
    assert "actor.fail()" in message
    assert "ended without notice" in message
    assert caught.value.rank == 1
    assert all(ended(pid) for pid in pids)


def test_a_process_that_dies_between_calls_fails_the_next_one_at_once(
    probes: Any, start: Any
) -> None:
    runtime = start(probes.pool("actor"), probes.pool("critic"))
    actor, critic = (probes.group(runtime, role, ranks=1) for role in ("actor", "critic"))
    pid = actor.where().result()[0]["pid"]
    waiting = critic.pause_for(3600.0)
    os.kill(pid, signal.SIGKILL)
    # A call of another pool ends too.
    with pytest.raises(
        WorkerError,
        match=rf"critic.pause_for\(\) was under way when actor rank 0 of 1 \(pid {pid} on .* died",
    ):
        waiting.result()
    with pytest.raises(WorkerError, match=r"actor.where\(\) was abandoned"):
        actor.where()


def test_replicas_are_closed_also_where_a_rank_has_died(
    probes: Any, start: Any, tmp_path: Path
) -> None:
    runtime = start(probes.pool("actor"), probes.pool("rollout"), run_directory=tmp_path)
    actor = probes.group(runtime, ranks=1)
    spec = probes.rollout()
    context = attrs.evolve(spec.context, run_directory=tmp_path)
    runtime.rollout_replicas(attrs.evolve(spec, context=context), 1)
    with pytest.raises(WorkerError):
        actor.fail("killed", (0,)).result()
    runtime.close()
    # The engine was closed, which releases what it holds outside its process, such as shared memory.
    assert (tmp_path / "closed-0").exists()


def test_asking_for_more_than_there_is_says_so_at_once(probes: Any, start: Any) -> None:
    with pytest.raises(PlacementError) as caught:
        start(probes.pool("actor", ranks=3), probes.pool("rollout", ranks=30))
    message = str(caught.value)
    assert "pool 'rollout' (rollout): 30 CPU" in message
    assert "8 CPUs free" in message
