"""Ending an engine whose start has not finished. vLLM waits for its processes in a call that returns only when they end."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

_ENGINE = "EngineCore"
"""Beginning of the names of vLLM's engine processes."""
_END_SECONDS = 5.0
"""Seconds that a process may take to end by itself."""


def engine_processes() -> list[BaseProcess]:
    """Return the running vLLM engine processes that this process has started."""
    return [one for one in multiprocessing.active_children() if one.name.startswith(_ENGINE)]


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
