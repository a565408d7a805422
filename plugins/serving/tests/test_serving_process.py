"""A server's process: its log, its process group, and its end with the rollout that started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.errors import RolloutError
from dovetail_serving import LOOPBACK, ServerProcess, free_port
from dovetail_serving.process import refuse_used

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
"""A program that prints its process id and its child's, and sleeps."""

TRAINER = """
import sys, time
from pathlib import Path
from dovetail_serving import ServerProcess
server = ServerProcess([sys.executable, "-c", sys.argv[1]], log=Path(sys.argv[2]), environment={})
time.sleep(600)
"""


def numbers(log: Path) -> list[int]:
    """Wait for the process ids that the program prints, and return them."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        text = log.read_text() if log.exists() else ""
        if text.endswith("\n") and "ready" in text:
            return [int(word) for word in text.split("ready")[-1].split()]
        time.sleep(0.05)
    raise AssertionError(f"nothing started: {text!r}")


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are still there"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_closing_ends_the_whole_group(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    server = ServerProcess([sys.executable, "-c", FAMILY], log=log, environment={})
    pids = numbers(log)
    assert server.exit_status is None
    server.close()
    server.close()
    assert server.exit_status is not None
    wait_until_gone(pids)


def test_a_trainer_that_is_killed_leaves_no_server_behind(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, FAMILY, str(log)])
    pids = numbers(log)
    trainer.kill()
    trainer.wait()
    wait_until_gone(pids)


def test_nor_does_one_whose_children_are_killed_with_it(tmp_path: Path) -> None:
    """Ray kills the direct children of a dying worker in this way."""
    log = tmp_path / "server.log"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, FAMILY, str(log)])
    pids = numbers(log)
    for pid in (*children(trainer.pid), trainer.pid):
        os.kill(pid, signal.SIGKILL)
    trainer.wait()
    wait_until_gone(pids)


def test_a_signal_to_what_the_trainer_started_ends_the_whole_group(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    server = ServerProcess([sys.executable, "-c", FAMILY], log=log, environment={})
    pids = numbers(log)
    os.kill(server._guard.pid, signal.SIGTERM)
    wait_until_gone(pids)
    server.close()
    assert server.exit_status == 128 + signal.SIGTERM


def test_children_of_a_server_that_is_killed_end_too(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    server = ServerProcess([sys.executable, "-c", FAMILY], log=log, environment={})
    pids = numbers(log)
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids)
    server.close()
    assert server.exit_status == 128 + signal.SIGKILL


def test_the_log_is_its_own_and_those_before_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    script = "import os, sys; print(os.environ['WHICH'], flush=True); sys.exit(3)"
    for which in ("first", "second", "third"):
        server = ServerProcess(
            [sys.executable, "-c", script], log=log, environment={"WHICH": which}
        )
        while server.exit_status is None:
            time.sleep(0.02)
        assert server.exit_status == 3
        server.close()
    kept = [
        path.read_text() for path in (log, tmp_path / "server.log.1", tmp_path / "server.log.2")
    ]
    assert kept == ["third\n", "first\n", "second\n"]


def test_a_port_in_use_is_refused_and_a_free_one_is_free() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            RolloutError, match=rf"127\.0\.0\.1:{port}: the port is in use"
        ) as found:
            refuse_used(port, "Engine")
        assert "rollout.port" in str(found.value.hint)
        assert free_port() != port
    refuse_used(free_port(), "Engine")
