"""Profilers of a process (`profile.tool`): torch.profiler, the accelerator's memory history, and ranges for Nsight Systems."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import ConfigError


class TorchTrace:
    """Profiles every thread of the process with torch.profiler, and writes a Chrome trace."""

    def __init__(self, device: str) -> None:
        profiler: Any = torch.profiler
        every = profiler.supported_activities()
        cpu = {profiler.ProfilerActivity.CPU}
        self._profile = profiler.profile(
            activities=cpu if torch.device(device).type == "cpu" else every,
            experimental_config=profiler._ExperimentalConfig(profile_all_threads=True),  # noqa: SLF001 - exported for this
        )
        self.label = profiler.record_function

    def start(self) -> None:
        """Start profiling on a dedicated thread. `stop` uses the same thread, since a worker's calls may come on several threads."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="profiler")
        self._thread.submit(self._profile.start).result()

    def stop(self, stem: Path) -> Path:
        """Stop profiling, write the trace to the file `STEM.json.gz` with `stem` as STEM, and return the file's path."""
        path = Path(f"{stem}.json.gz")
        self._thread.submit(self._profile.stop).result()
        self._thread.shutdown()
        self._profile.export_chrome_trace(str(path))
        return path


class MemoryHistory:
    """Records every allocation of the accelerator with its stack, and writes a snapshot for pytorch.org/memory_viz.

    The torch functions called are private but documented: docs.pytorch.org/docs/stable/torch_cuda_memory.
    """

    def __init__(self, device: str) -> None:
        self._memory: Any = getattr(_device_module(device), "memory", None)
        if not hasattr(self._memory, "_record_memory_history"):
            raise ConfigError(
                f"profile.tool=memory can't be used on {device}: torch keeps no history of this device's allocations",
                hint="run on a device with such a history, such as an NVIDIA GPU, or set profile.tool=torch",
            )
        self.label = nullcontext

    def start(self) -> None:
        """Start recording allocations with their stacks."""
        self._memory._record_memory_history()  # noqa: SLF001

    def stop(self, stem: Path) -> Path:
        """Write the snapshot to the file `STEM.pickle` with `stem` as STEM, stop recording, and return the file's path."""
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
                f"profile.tool=nsys needs an NVIDIA GPU; the device is {device}",
                hint="run on an NVIDIA GPU under `nsys profile`, or set profile.tool=torch",
            )
        self.label = nvtx.range

    def start(self) -> None:
        """Start Nsight Systems' recording after all queued work of the device has finished."""
        # Kernels that were queued before the range must not be recorded in it.
        self._module.synchronize()
        self._module.profiler.start()

    def stop(self, stem: Path) -> None:
        """Stop Nsight Systems' recording after all queued work has finished. Nsight Systems writes the file; `stem` is not used."""
        # Kernels that were queued in the range may still run, and belong to it.
        self._module.synchronize()
        self._module.profiler.stop()


def _device_module(device: str) -> Any:
    return torch.get_device_module(torch.device(device))
