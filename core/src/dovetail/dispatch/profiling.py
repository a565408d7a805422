"""Profiling of workers: measurement of a process's memory, and the base class of workers that can be profiled.

A process has one recording at a time, even with several roles: a profiler records the whole process. Packages provide the profilers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import attrs

from dovetail.dispatch.registration import Dispatch, register
from dovetail.dispatch.worker import Worker
from dovetail.errors import ConfigError

PROFILER_GROUP = "dovetail.profiler"
"""Entry-point group of profilers: `tool = "module:Class"`, the `Recorder` for a value of `profile.tool`."""


@attrs.frozen(kw_only=True)
class ProfileSpec:
    """The settings of a profile, the same for every role and rank."""

    tool: str
    """The name of an entry point of `dovetail.profiler`, such as `torch`."""
    directory: Path
    """Directory of the written files."""
    first: int
    """First step that is recorded."""
    last: int
    """Last step that is recorded."""
    ranks: tuple[int, ...] = (0,)
    """Ranks of each role that are recorded."""


class ProfiledWorker(Worker):
    """A worker that can be profiled.

    The run calls the profiling methods around the steps that `ProfileSection.steps` selects, and `memory` around every update.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_profile(self, spec: ProfileSpec) -> None:
        """Check that `start_profile` would work on this worker.

        Raises:
            ConfigError: the tool can't record on this worker's device.
        """
        if self.rank in spec.ranks:
            recorder(spec.tool, str(self.context.device))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, spec: ProfileSpec) -> None:
        """Start recording this process if its rank is to be recorded, unless another role's recording, which covers all roles, is running.

        Raises:
            ConfigError: the tool can't record on this worker's device.
        """
        global _recording  # noqa: PLW0603 - a process has one
        with _lock:
            if _recording is None and self.rank in spec.ranks:
                tool = recorder(spec.tool, str(self.context.device))
                spec.directory.mkdir(parents=True, exist_ok=True)
                tool.start()
                name = f"{self.context.role}-rank{self.rank}-steps{spec.first}-{spec.last}"
                _recording = _Recording(self, tool, spec.directory / name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str | None:
        """End the recording that this worker began, and write its file.

        Returns:
            The path of the file; None if this worker writes none.
        """
        global _recording
        with _lock:
            if _recording is None or _recording.owner is not self:
                return None
            ended, _recording = _recording, None
            path = ended.recorder.stop(ended.stem)
            return None if path is None else str(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, float]:
        """Return the memory of this rank's process in bytes, and reset the peaks.

        Returns:
            `rss_bytes`: resident host memory. On an accelerator also `max_memory_allocated_bytes` and `max_memory_reserved_bytes`: peaks
            since the last call, over all roles of the process.
        """
        return host_memory() | take_peaks(str(self.context.device))


def host_memory() -> dict[str, float]:
    """Return this process's resident host memory as `rss_bytes`; an empty dict if the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"rss_bytes": float(pages * os.sysconf("SC_PAGE_SIZE"))}


def take_peaks(device: str) -> dict[str, float]:
    """Return a device's peak memory in bytes since the last call, and reset the peaks; an empty dict for a CPU.

    `max_memory_allocated_bytes` counts tensors, `max_memory_reserved_bytes` what torch's allocator reserved.

    Args:
        device: torch device of this process.
    """
    if device.startswith("cpu"):
        return {}
    import torch

    peaks = {
        "max_memory_allocated_bytes": float(torch.accelerator.max_memory_allocated(device)),
        "max_memory_reserved_bytes": float(torch.accelerator.max_memory_reserved(device)),
    }
    # torch can't reset the peaks of a device that this process has not used yet.
    if peaks["max_memory_reserved_bytes"]:
        torch.accelerator.reset_peak_memory_stats(device)
    return peaks


def labelled(worker: object, method: str) -> AbstractContextManager[Any]:
    """Return a context that labels a call of `method` in this process's profile; without a running profiler it has no effect."""
    recording = _recording
    if recording is None:
        return nullcontext()
    role = getattr(getattr(worker, "context", None), "role", "") or type(worker).__name__
    return recording.recorder.label(f"{role}.{method}")


class Recorder(Protocol):
    """A profiler of one process: the class behind an entry point of the group `dovetail.profiler`, constructed with the torch device.

    The constructor raises ConfigError if the profiler can't record on that device.
    """

    label: Callable[[str], AbstractContextManager[Any]]
    """Function of a label, such as `actor.update`, that returns a context for the labelled block."""

    def start(self) -> None:
        """Start recording."""

    def stop(self, stem: Path) -> Path | None:
        """Stop recording, write a file whose path begins with `stem`, and return the path; None if another program writes the file."""


def recorder(tool: str, device: str) -> Recorder:
    """Return the recorder for a tool of `profile.tool`.

    Raises:
        ConfigError: no package provides the tool, or the tool can't record on this device.
    """
    found = entry_points(group=PROFILER_GROUP)
    if tool not in found.names:
        raise ConfigError(
            f"profile.tool is {tool!r}; expected {' or '.join(sorted(found.names)) or 'a tool from an installed package, but none is installed'}",
            hint=f"set profile.tool to an installed tool, or install the package that provides {tool!r}; dovetail-torch-engines provides torch, memory and nsys",
        )
    made: Recorder = found[tool].load()(device)
    return made


@attrs.frozen(eq=False)
class _Recording:
    """The running recording of this process, with the worker that started it."""

    owner: ProfiledWorker
    recorder: Recorder
    stem: Path


_recording: _Recording | None = None
_lock = threading.Lock()
