"""An accelerator's memory: how much is free, and offloading of tensors that are needed much later to host memory."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
OFFLOAD_AT_LEAST = 2**20
"""Smallest size in bytes of a tensor that is offloaded; moving smaller tensors costs more than it saves."""


class MemoryBudget:
    """The memory of one accelerator.

    Args:
        device: the accelerator.
        limit_gib: the limit in GiB of this process's allocations on the accelerator; None for all memory.
    """

    def __init__(self, device: torch.device, limit_gib: float | None = None) -> None:
        self._device, self._limit = device, limit_gib

    def allocated(self) -> int:
        """Return the number of bytes that tensors hold on the accelerator."""
        return int(torch.accelerator.memory_allocated(self._device))

    def free(self) -> int:
        """Return the bytes still available to tensors: free memory of the device, and unused memory of the allocator.

        Unused parts of the allocator's partly used blocks are not counted, since only small tensors fit into them.
        """
        of_device, _ = torch.accelerator.get_memory_info(self._device)
        allocated = self.allocated()
        held = int(torch.accelerator.memory_reserved(self._device)) - allocated
        rests = torch.accelerator.memory_stats(self._device).get(
            "inactive_split_bytes.all.current", 0
        )
        free = of_device + held - int(rests)
        if self._limit is not None:
            free = min(free, int(self._limit * GIB) - allocated)
        return max(0, free)


def use_expandable_segments(device: torch.device) -> None:
    """Enable expandable segments in CUDA's allocator, since tensors of varying sizes fragment memory.

    The setting applies to this process only: an inference engine's server would inherit an environment variable, and vLLM's sleep
    mode refuses expandable segments. A setting already in the environment is kept.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if device.type == "cuda" and "expandable_segments" not in settings:
        # torch has no public function for this.
        settings = f"{settings},expandable_segments:True".lstrip(",")
        torch._C._accelerator_setAllocatorSettings(settings)  # noqa: SLF001


def offloading() -> AbstractContextManager[Any]:
    """Return a context that moves the large tensors saved for the backward pass to pinned host memory.

    Tensors are copied on a separate stream; the backward pass waits for each tensor that it needs.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device)


class _OnHost:
    """A tensor that was offloaded to host memory."""

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        self._device = device
        stream = _side_stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with stream:
            self._tensor.copy_(tensor, non_blocking=True)
        # The tensor's device memory must not be reused before the copy is done.
        tensor.record_stream(stream)

    def fetch(self) -> Tensor:
        """Return a copy on the device that the tensor came from."""
        # Wait for the copy to the host. The copy back is on the current stream, whose kernels wait for it anyway.
        torch.accelerator.current_stream(self._device).wait_stream(_side_stream(self._device))
        return self._tensor.to(self._device, non_blocking=True)


_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.Stream(device)
    return _streams[device]


def _to_host(tensor: Tensor) -> Tensor | _OnHost:
    large = tensor.numel() * tensor.element_size() >= OFFLOAD_AT_LEAST
    return _OnHost(tensor) if large and tensor.device.type != "cpu" else tensor


def _to_device(kept: Tensor | _OnHost) -> Tensor:
    return kept.fetch() if isinstance(kept, _OnHost) else kept
