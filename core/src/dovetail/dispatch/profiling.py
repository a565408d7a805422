"""Profiling of workers: the tools, a process's memory, and what every training engine inherits to be profiled and measured.

A process has one recording at a time, whatever the roles in it: a profiler sees all of the process. torch is imported
when something is recorded.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs

from dovetail.dispatch.registration import Dispatch, register
from dovetail.dispatch.worker import Worker
from dovetail.errors import ConfigError


@attrs.frozen(kw_only=True)
class ProfileSpec:
    """The settings of a profile, the same for every role and rank."""

    tool: str
    """`torch`, `memory` or `nsys`."""
    directory: Path
    """Where files go."""
    first: int
    """First step."""
    last: int
    """Last step."""
    ranks: tuple[int, ...] = (0,)
    """Ranks of each role that are recorded; the others do nothing."""


class ProfiledWorker(Worker):
    """A worker that can be profiled: `StepProfile` calls these around the steps that the config names, the learner `memory`
    around every update.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_profile(self, spec: ProfileSpec) -> None:
        """Find out whether `start_profile` would work here.

        Raises:
            ConfigError: the tool can't record on this worker's device.
        """
        if self.rank in spec.ranks:
            recorder(spec.tool, str(self.context.device))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, spec: ProfileSpec) -> None:
        """Start recording this process, unless another role has started in it: then its recording holds both.

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
            The path of the file; None where none is written here.
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
            `rss_bytes`: host memory that is resident now. On an accelerator `max_memory_allocated_bytes` and
            `max_memory_reserved_bytes`: the peaks since the last call, whichever role made them.
        """
        return host_memory() | take_peaks(str(self.context.device))


def host_memory() -> dict[str, float]:
    """Return `rss_bytes`, the host memory that is resident for this process; nothing where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"rss_bytes": float(pages * os.sysconf("SC_PAGE_SIZE"))}


def take_peaks(device: str) -> dict[str, float]:
    """Return the peaks since the last call, in bytes: `max_memory_allocated_bytes` by tensors, and
    `max_memory_reserved_bytes` by torch's allocator; nothing for a CPU.

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
    # torch refuses to reset the figures of a device that this process has not used yet.
    if peaks["max_memory_reserved_bytes"]:
        torch.accelerator.reset_peak_memory_stats(device)
    return peaks


def labelled(worker: object, method: str) -> AbstractContextManager[Any]:
    """Label a call in this process's profile; without a running profiler this does nothing."""
    recording = _recording
    if recording is None:
        return nullcontext()
    role = getattr(getattr(worker, "context", None), "role", "") or type(worker).__name__
    return recording.recorder.label(f"{role}.{method}")


class TorchTrace:
    """torch.profiler over every thread of the process, as a Chrome trace."""

    def __init__(self, device: str) -> None:
        import torch

        profiler: Any = torch.profiler
        every = profiler.supported_activities()
        cpu = {profiler.ProfilerActivity.CPU}
        self._profile = profiler.profile(
            activities=cpu if torch.device(device).type == "cpu" else every,
            experimental_config=profiler._ExperimentalConfig(profile_all_threads=True),  # noqa: SLF001 - exported for this
        )
        self.label = profiler.record_function

    def start(self) -> None:
        """Start profiling on a dedicated thread, which also stops it: a worker's calls may come on several threads."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="profiler")
        self._thread.submit(self._profile.start).result()

    def stop(self, stem: Path) -> Path:
        """Stop profiling, and write the trace."""
        path = Path(f"{stem}.json.gz")
        self._thread.submit(self._profile.stop).result()
        self._thread.shutdown()
        self._profile.export_chrome_trace(str(path))
        return path


class MemoryHistory:
    """Every allocation of the accelerator with its stack, as a snapshot for pytorch.org/memory_viz.

    Its functions are documented in spite of their names: docs.pytorch.org/docs/stable/torch_cuda_memory.
    """

    def __init__(self, device: str) -> None:
        self._memory: Any = getattr(_device_module(device), "memory", None)
        if not hasattr(self._memory, "_record_memory_history"):
            raise ConfigError(
                "profile.tool=memory records the allocations of an accelerator, and torch keeps no history of those "
                f"on {device}",
                hint="run on an accelerator that has it, or set profile.tool=torch",
            )
        self.label = nullcontext

    def start(self) -> None:
        """Start recording."""
        self._memory._record_memory_history()  # noqa: SLF001

    def stop(self, stem: Path) -> Path:
        """Write the snapshot, and stop recording."""
        path = Path(f"{stem}.pickle")
        try:
            self._memory._dump_snapshot(str(path))  # noqa: SLF001
        finally:
            self._memory._record_memory_history(enabled=None)  # noqa: SLF001
        return path


class ProfilerRange:
    """Starts and stops Nsight Systems' recording, and marks the calls of workers with NVTX ranges."""

    def __init__(self, device: str) -> None:
        self._module = _device_module(device)
        profiler, nvtx = (getattr(self._module, name, None) for name in ("profiler", "nvtx"))
        if not hasattr(profiler, "start") or nvtx is None:
            raise ConfigError(
                f"profile.tool=nsys marks ranges by the profiler of an NVIDIA GPU, which {device} is not",
                hint="run on an NVIDIA GPU under `nsys profile`, or set profile.tool=torch",
            )
        self.label = nvtx.range

    def start(self) -> None:
        """Start the range."""
        self._module.synchronize()
        self._module.profiler.start()

    def stop(self, stem: Path) -> None:
        """End the range; Nsight Systems writes the file."""
        self._module.synchronize()
        self._module.profiler.stop()


Recorder = TorchTrace | MemoryHistory | ProfilerRange


def recorder(tool: str, device: str) -> Recorder:
    """Return the recorder for a tool of `profile.tool`.

    Raises:
        ConfigError: the tool can't record on this device.
    """
    tools: dict[str, type[Recorder]] = {
        "torch": TorchTrace,
        "memory": MemoryHistory,
        "nsys": ProfilerRange,
    }
    return tools[tool](device)


@attrs.frozen(eq=False)
class _Recording:
    """What this process records now, for the worker that began it."""

    owner: ProfiledWorker
    recorder: Recorder
    stem: Path


_recording: _Recording | None = None
_lock = threading.Lock()


def _device_module(device: str) -> Any:
    import torch

    return torch.get_device_module(torch.device(device))
