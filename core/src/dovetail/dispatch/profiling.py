"""Profiling of workers: the tools, and what every training engine inherits to be profiled and measured.

A process has one recording at a time, whatever the roles in it: a profiler sees all of the process. torch is imported
when something is recorded.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs

from dovetail.dispatch.memory import host_memory, take_peaks
from dovetail.dispatch.registration import Dispatch, register
from dovetail.dispatch.worker import Worker
from dovetail.errors import ConfigError, DovetailError


@attrs.frozen(kw_only=True)
class ProfileSpec:
    """What is recorded: the same for every role and rank that takes part."""

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
            RECORDERS[spec.tool](str(self.context.device)).check()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, spec: ProfileSpec) -> None:
        """Begin to record this process, or take part in the recording that another role has begun in it.

        Raises:
            ConfigError: the tool can't record on this worker's device.
            DovetailError: another recording is under way.
        """
        if self.rank in spec.ranks:
            _start(spec, str(self.context.role), self.rank, str(self.context.device))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> str | None:
        """End what `start_profile` began; the last role of a process to do so writes its file.

        Returns:
            The path of the file; None where none is written here.
        """
        return _stop(str(self.context.role), self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, float]:
        """Return the memory of this rank's process in bytes, and begin to measure peaks anew.

        Returns:
            `rss_bytes`: host memory that is resident now. On an accelerator `max_memory_allocated_bytes` and
            `max_memory_reserved_bytes`: the peaks since the last call, whichever role made them.
        """
        return host_memory() | take_peaks(str(self.context.device))


def labelled(worker: object, method: str) -> AbstractContextManager[Any]:
    """Mark a call in the recording of this process; does nothing where there is none."""
    recording = _recording
    if recording is None:
        return nullcontext()
    role = getattr(getattr(worker, "context", None), "role", "") or type(worker).__name__
    return recording.recorder.label(f"{role}.{method}")


class ProfilerBackend(ABC):
    """A tool that records this process.

    Args:
        device: the worker's torch device.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)

    @abstractmethod
    def check(self) -> None:
        """Refuse what can't work here, with a ConfigError."""

    @abstractmethod
    def start(self) -> None:
        """Begin."""

    @abstractmethod
    def stop(self, stem: Path) -> Path | None:
        """End, and write the file: `stem` with an ending of the tool's own."""

    def label(self, name: str) -> AbstractContextManager[Any]:
        """Mark what runs within."""
        return nullcontext()


class TorchTrace(ProfilerBackend):
    """torch.profiler over every thread of the process, as a Chrome trace."""

    def check(self) -> None:
        """Every torch can."""

    def start(self) -> None:
        import torch

        profiler: Any = torch.profiler
        activities = {profiler.ProfilerActivity.CPU}
        if self.device.type != "cpu":
            activities = set(profiler.supported_activities())
        # It must start and stop on one thread, and a worker's calls may come on several.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="profiler")
        every_thread = profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001 - exported for this
        self._profile = profiler.profile(
            activities=sorted(activities, key=str), experimental_config=every_thread
        )
        self._thread.submit(self._profile.start).result()

    def stop(self, stem: Path) -> Path:
        path = Path(f"{stem}.json.gz")
        self._thread.submit(self._profile.stop).result()
        self._thread.shutdown()
        self._profile.export_chrome_trace(str(path))
        return path

    def label(self, name: str) -> AbstractContextManager[Any]:
        from torch.profiler import record_function

        return record_function(name)


class MemoryHistory(ProfilerBackend):
    """Every allocation of the accelerator with its stack, as a snapshot for pytorch.org/memory_viz."""

    def check(self) -> None:
        self._memory()

    def start(self) -> None:
        self._memory()._record_memory_history()  # noqa: SLF001 - documented: docs.pytorch.org/docs/stable/torch_cuda_memory

    def stop(self, stem: Path) -> Path:
        path = Path(f"{stem}.pickle")
        memory = self._memory()
        try:
            memory._dump_snapshot(str(path))  # noqa: SLF001 - as above
        finally:
            memory._record_memory_history(enabled=None)  # noqa: SLF001 - as above
        return path

    def _memory(self) -> Any:
        memory = getattr(_device_module(self.device), "memory", None)
        if not hasattr(memory, "_record_memory_history"):
            raise ConfigError(
                "profile.tool=memory records the allocations of an accelerator, and torch keeps no history of those "
                f"on {self.device}",
                hint="run on an accelerator that has it, or set profile.tool=torch",
            )
        return memory


class ProfilerRange(ProfilerBackend):
    """Tells Nsight Systems where to record, and marks the calls of workers by NVTX ranges."""

    def check(self) -> None:
        self._modules()

    def start(self) -> None:
        profiler, _ = self._modules()
        _device_module(self.device).synchronize()
        profiler.start()

    def stop(self, stem: Path) -> None:
        profiler, _ = self._modules()
        _device_module(self.device).synchronize()
        profiler.stop()

    def label(self, name: str) -> AbstractContextManager[Any]:
        _, nvtx = self._modules()
        return nvtx.range(name)

    def _modules(self) -> tuple[Any, Any]:
        module = _device_module(self.device)
        profiler, nvtx = getattr(module, "profiler", None), getattr(module, "nvtx", None)
        if not hasattr(profiler, "start") or nvtx is None:
            raise ConfigError(
                f"profile.tool=nsys marks ranges by the profiler of an NVIDIA GPU, which {self.device} is not",
                hint="run on an NVIDIA GPU under `nsys profile`, or set profile.tool=torch",
            )
        return profiler, nvtx


RECORDERS: dict[str, Callable[[str], ProfilerBackend]] = {
    "torch": TorchTrace,
    "memory": MemoryHistory,
    "nsys": ProfilerRange,
}


@attrs.define(eq=False)
class _Recording:
    """What this process records now."""

    spec: ProfileSpec
    rank: int
    recorder: ProfilerBackend
    roles: list[str]
    """Roles that took part."""
    running: set[tuple[str, int]]
    """Roles and ranks that have not stopped."""


_recording: _Recording | None = None
_lock = threading.Lock()


def _start(spec: ProfileSpec, role: str, rank: int, device: str) -> None:
    global _recording  # noqa: PLW0603 - a process has one
    with _lock:
        if _recording is None:
            recorder = RECORDERS[spec.tool](device)
            recorder.check()
            spec.directory.mkdir(parents=True, exist_ok=True)
            recorder.start()
            _recording = _Recording(spec, rank, recorder, [role], {(role, rank)})
        elif _recording.spec != spec or (role, rank) in _recording.running:
            raise DovetailError(
                f"{role} can't be profiled over {_steps(spec)}: this process already records "
                f"{' and '.join(_recording.roles)} over {_steps(_recording.spec)}"
            )
        else:
            if role not in _recording.roles:
                _recording.roles.append(role)
            _recording.running.add((role, rank))


def _steps(spec: ProfileSpec) -> str:
    one = spec.first == spec.last
    return f"step {spec.first}" if one else f"steps {spec.first} to {spec.last}"


def _stop(role: str, rank: int) -> str | None:
    global _recording  # noqa: PLW0603 - a process has one
    with _lock:
        recording = _recording
        if recording is None or (role, rank) not in recording.running:
            return None
        recording.running.discard((role, rank))
        if recording.running:
            return None
        _recording = None
        spec = recording.spec
        name = f"{'+'.join(recording.roles)}-rank{recording.rank}-steps{spec.first}-{spec.last}"
        path = recording.recorder.stop(spec.directory / name)
        return None if path is None else str(path)


def _device_module(device: object) -> Any:
    import torch

    return torch.get_device_module(device)
