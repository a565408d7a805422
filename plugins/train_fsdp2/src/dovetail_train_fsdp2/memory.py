"""An accelerator's memory: how much is free, and the host's memory in place of it for what is needed much later."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
OFFLOAD_AT_LEAST = 2**20
"""Smaller tensors stay: moving them costs more than they take, bytes."""


class MemoryBudget:
    """Of one accelerator.

    Args:
        device: the accelerator.
        limit_gib: what this process may allocate there at most, GiB; None is all that there is.
    """

    def __init__(self, device: torch.device, limit_gib: float | None = None) -> None:
        self._device, self._limit = device, limit_gib

    def allocated(self) -> int:
        """Bytes that tensors hold."""
        return int(torch.accelerator.memory_allocated(self._device))

    def free(self) -> int:
        """Bytes that tensors can still take: what the device has left, and what the allocator holds in reserve."""
        of_device, _ = torch.accelerator.get_memory_info(self._device)
        allocated = self.allocated()
        free = of_device + int(torch.accelerator.memory_reserved(self._device)) - allocated
        if self._limit is not None:
            free = min(free, int(self._limit * GIB) - allocated)
        return max(0, free)


def offloading() -> AbstractContextManager[Any]:
    """Within it, large tensors that the backward pass will ask for wait in pinned host memory.

    They travel on a stream of their own; the backward pass waits for those that it asks for.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device)


class _OnHost:
    """A tensor that waits in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        self._device = device
        stream = _side_stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with stream:
            self._tensor.copy_(tensor, non_blocking=True)
        # Its memory must not serve another tensor before the copy is done.
        tensor.record_stream(stream)

    def fetch(self) -> Tensor:
        """A copy on the device that it came from."""
        # The copy to the host must be done; kernels on the current stream then wait for the copy back by themselves.
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
