"""Task workers on a real cluster: they answer, fail, die, start again, and end with the runtime."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dovetail.errors import PlacementError, WorkerError
from dovetail.interfaces import TaskSpec
from dovetail_runtime_ray import executor
from dovetail_runtime_ray.capacity import Node
from dovetail_serving import guard

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def runtime(start_for_module, probes, tmp_path_factory):
    """A runtime with a small pool, whose workers find the probe."""
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    return start_for_module(
        probes.pool("actor"),
        run_directory=tmp_path_factory.mktemp("run"),
        env_vars={"PYTHONPATH": path},
    )


def spec(count: int = 1, given: bytes = b"given", **needs: float) -> TaskSpec:
    target = "probe_task:make"
    return TaskSpec(label="probe", target=target, setup=given, count=count, **needs)


def test_workers_answer_each_in_a_process_of_its_own(runtime) -> None:
    workers = runtime.task_workers(spec(2))
    answers = [worker.call(b"hello").result(240).split() for worker in workers]
    assert [answer[:2] for answer in answers] == [[b"given", b"hello"]] * 2
    pids = {int(answer[2]) for answer in answers}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert all(f"pid {int(a[2])} " in w.where for a, w in zip(answers, workers, strict=True))
    assert workers[0].call(b"accelerators").result(240) == b"''"


def test_one_that_raises_lives_and_one_that_dies_is_started_again(runtime) -> None:
    (worker,) = runtime.task_workers(spec())
    with pytest.raises(WorkerError, match="raised ValueError"):
        worker.call(b"raise").result(240)
    assert worker.lost is None
    with pytest.raises(WorkerError, match=r"probe worker 0 \(pid \d+ on .*\) died"):
        worker.call(b"die").result(240)
    assert "died" in worker.lost
    again = worker.again()
    assert again.call(b"x").result(240).startswith(b"given x ")
    assert again.where != worker.where
    again.kill()
    with pytest.raises(WorkerError):
        again.call(b"x").result(240)


def test_what_a_start_raises_is_raised_here(runtime) -> None:
    with pytest.raises(ValueError, match="does not start") as caught:
        runtime.task_workers(spec(given=b"refuse"))
    assert any("probe worker 0" in note for note in caught.value.__notes__)


def test_what_no_machine_has_free_is_refused_at_once(runtime) -> None:
    with pytest.raises(PlacementError, match=r"process of probe .* needs 0 CPU.* and 1000"):
        runtime.task_workers(spec(accelerators=1000))


def test_one_whose_machine_is_gone_may_wait_for_a_place(monkeypatch) -> None:
    """Every attempt reports the missing resources."""
    monkeypatch.setattr(executor.ray, "put", lambda value: value)
    free = {"CPU": 1.0}
    nodes = [Node(node_id="a", address="", host="a", total=free, free=free)]
    workers = executor.TaskWorkers(spec(cpus=1.0), None, None, lambda: nodes)
    workers._find_homes([0])
    nodes.clear()
    for _ in range(2):
        with pytest.raises(PlacementError, match="no machine"):
            workers._again(0)


def test_closing_waits_longer_than_a_server_of_the_task_has_to_end() -> None:
    assert executor.CLOSE_SECONDS > guard.GRACE


def test_workers_close_in_peace_with_the_runtime(start, probes, tmp_path) -> None:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    runtime = start(probes.pool("actor"), run_directory=tmp_path, env_vars={"PYTHONPATH": path})
    (worker,) = runtime.task_workers(spec())
    pid = int(worker.call(b"").result(240).split()[-1])
    runtime.close()
    assert "closed in peace" in (tmp_path / "logs" / "probe-0.jsonl").read_text()
    for _ in range(1200):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still there")
