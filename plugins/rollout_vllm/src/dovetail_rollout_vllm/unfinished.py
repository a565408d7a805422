"""Ending an engine whose start has not finished. vLLM waits for its processes in a call that returns only when they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.process import BaseProcess

_ENGINE = "EngineCore"
"""Beginning of the names of vLLM's engine processes."""
_END_SECONDS = 5.0
"""Seconds that a process may take to end by itself."""
_POLL_SECONDS = 0.05
"""Seconds between looks for a new process."""


def engine_processes() -> list[BaseProcess]:
    """Return the running vLLM engine processes that this process has started."""
    return [one for one in multiprocessing.active_children() if one.name.startswith(_ENGINE)]


def await_process(
    others: Sequence[BaseProcess], making: Future[None], timeout: float
) -> list[BaseProcess]:
    """Wait until an engine that is being made has started its process, and return the process.

    Args:
        others: the engine processes that were running before.
        making: the future of the call that constructs the engine.
        timeout: the maximum wait in seconds.

    Returns:
        The engine's process; empty if the call returned or the time-out passed before a process started.
    """
    until = time.monotonic() + timeout
    while not making.done() and time.monotonic() < until:
        if found := [one for one in engine_processes() if one not in others]:
            return found
        time.sleep(_POLL_SECONDS)
    return []


def end(processes: Sequence[BaseProcess]) -> None:
    """Stop processes and their children by a signal, and kill processes that ignore the signal."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    started: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            started += psutil.Process(process.pid).children(recursive=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_END_SECONDS)
        # No effect if the process has ended.
        process.kill()
        process.join()
    # Children may take a moment to end by themselves.
    _, left = psutil.wait_procs(started, timeout=_END_SECONDS)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
