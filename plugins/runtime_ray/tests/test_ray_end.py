"""Nothing is left behind: no process, no shared memory, no file, no reservation, however the controller ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail_runtime_ray import sweeper

DRIVER = Path(__file__).parent / "probe_driver.py"


def until(true: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether a condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return true()


class Driver:
    """A controller in its own session, so that a signal to its process group acts like Ctrl-C in a terminal."""

    def __init__(self, then: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WITH_SIGNALS, str(DRIVER), then],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.told: dict[str, Any] = json.loads(line)

    @property
    def directory(self) -> str:
        return str(self.told["directory"])

    def processes(self) -> list[int]:
        return sweeper.marked_processes(self.directory)

    def running(self) -> list[int]:
        """The workers that have not ended; zombies have ended."""
        return [pid for pid in self.told["pids"] if _state(pid) not in {"", "Z"}]

    def end(self) -> tuple[int, str]:
        """Wait for the controller; return its exit status and stderr."""
        _, written = self.process.communicate(timeout=240)
        return self.process.returncode, written


def _state(pid: int) -> str:
    """The state of a process as in proc_pid_stat(5), such as `S` or `Z`; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


# Background jobs of a shell ignore SIGINT, and their children inherit this; jobs in a terminal don't ignore it.
_WITH_SIGNALS = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def shared_memory() -> set[str]:
    """The names of segments before the test; other programs may add and remove segments meanwhile."""
    return {place.name for place in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)],
)
def test_an_ended_controller_leaves_nothing(
    number: signal.Signals, shared_memory: set[str]
) -> None:
    driver = Driver("wait")
    assert len(driver.running()) == 2
    assert len(driver.processes()) > 4
    if number == signal.SIGINT:
        os.killpg(driver.process.pid, number)
    else:
        driver.process.send_signal(number)
    status, written = driver.end()
    assert status != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in written
    assert until(lambda: not driver.processes()), driver.processes()
    assert until(lambda: not Path(driver.directory).exists())
    assert until(lambda: not driver.running()), driver.running()
    now = {place.name for place in Path("/dev/shm").iterdir()}
    assert not {name for name in now - shared_memory if "plasma" in name}


def test_a_finished_run_leaves_nothing_and_prints_nothing() -> None:
    driver = Driver("finish")
    assert driver.end() == (0, "")
    assert not driver.processes()
    assert not Path(driver.directory).exists()


@pytest.mark.parametrize("then", ["wait", pytest.param("finish", marks=pytest.mark.nightly)])
def test_an_existing_cluster_lives_on_and_gets_everything_back(cluster: Any, then: str) -> None:
    import ray
    from ray.util import placement_group_table

    address = ray.get_runtime_context().gcs_address
    # Ray would replace 127.0.0.1 by another address of this machine, on which the cluster does not listen.
    driver = Driver(then, RAY_ADDRESS=address, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    assert driver.told["directory"] is None
    if then == "wait":
        driver.process.kill()
    status, _ = driver.end()
    assert (status == 0) == (then == "finish")
    assert until(lambda: not driver.running()), driver.running()

    def states() -> set[str]:
        table = placement_group_table()
        return {table[group]["state"] for group in driver.told["groups"]}

    assert until(lambda: states() == {"REMOVED"}), states()
    free = {kind: amount for node in cluster.nodes() for kind, amount in node.free.items()}
    assert until(lambda: cluster.nodes()[0].free["CPU"] == 8.0), free
