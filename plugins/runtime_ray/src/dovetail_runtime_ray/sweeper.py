"""Removal of a local cluster's processes and files after its driver was killed; also runs as a program, on bare Python.

Every process of the cluster has the cluster's directory in an environment variable, so that exactly these processes are
found. Works on Linux only: on other systems no process is found, and only the directory is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "DOVETAIL_RAY_CLUSTER"
"""Environment variable that holds the cluster's directory, in every process of a local cluster."""
PREFIX = "dovetail-ray-"
"""Prefix of the directory's name."""

_PROC = Path("/proc")


def marked_processes(directory: str) -> list[int]:
    """Return the ids of processes whose variable `DOVETAIL_RAY_CLUSTER` is this directory, without zombies."""
    wanted = f"{MARK}={directory}".encode()
    found = []
    for place in _PROC.glob("[0-9]*"):
        try:
            carried = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # the process has ended, or is another user's
        if wanted in carried:
            found.append(int(place.name))
    return found


def sweep(directory: str, patience: float) -> list[int]:
    """Wait `patience` seconds for the cluster's processes to end, kill the rest, and remove the directory.

    Returns:
        Ids of the processes that were killed.
    """
    deadline = time.monotonic() + patience
    left = [pid for pid in marked_processes(directory) if pid != os.getpid()]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in marked_processes(directory) if pid != os.getpid()]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    if Path(directory).name.startswith(PREFIX):
        shutil.rmtree(directory, ignore_errors=True)
    return left


def watch(parent: int, directory: str) -> None:
    """Sleep until the parent process has ended; then sweep, unless the parent has removed the directory."""
    while os.getppid() == parent:
        time.sleep(0.5)
        if not Path(directory).exists():
            return
    sweep(directory, patience=5.0)


if __name__ == "__main__":
    # The sweeper must outlive the driver, even if a signal is sent to every process of a job.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), sys.argv[2])
