"""CudaMemory: GPU memory that other processes open by IPC handles, allocated outside torch's allocator.

torch's own allocator may hand out expandable segments, which have no IPC handles; memory from cudaMalloc always has one.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor

from dovetail.errors import PluginNeedsError, WeightSyncError

_HANDLE_BYTES = 64
"""Size of an IPC handle, CUDA_IPC_HANDLE_SIZE."""


@attrs.frozen(kw_only=True, eq=False)
class Allocation:
    """GPU memory that this process has allocated, or opened by another process's IPC handle."""

    address: int
    """Address of the memory in this process."""
    size: int
    """Size of the memory in bytes."""
    octets: Tensor | None
    """uint8 [size], the memory as a tensor; None for another device's memory, which can only be copied from."""
    handle: bytes
    """The IPC handle with which other processes open the memory."""


@attrs.define
class _Opened:
    address: int
    users: int


_lock = threading.Lock()
_made: dict[bytes, int] = {}
"""Addresses of the memory that this process exports, by handle: CUDA does not open a handle in the process that made it."""
_opened: dict[tuple[bytes, int], _Opened] = {}
"""Memory that this process has opened, by handle and device index; opened once for all receivers of the process."""


class CudaMemory:
    """Memory of one GPU, shared with other processes by CUDA IPC. Sizes are in bytes.

    Args:
        device: the device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def identity(self) -> str:
        """The device's UUID, equal in all processes of the machine although the device's index may differ."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    @cached_property
    def _runtime(self) -> Any:
        try:
            return importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise PluginNeedsError(
                "the cuda_ipc transport needs cuda-bindings", hint="pip install cuda-bindings"
            ) from error

    def allocate(self, size: int) -> Allocation:
        """Allocate memory that other processes can open, outside torch's allocator.

        Raises:
            WeightSyncError: the device lacks free memory, or its memory can't be shared.
        """
        with torch.cuda.device(self._device):
            self._use_device()
            code, address = self._runtime.cudaMalloc(size)
            if self._failed(code):
                torch.cuda.empty_cache()  # torch's allocator may hold unused memory
                code, address = self._runtime.cudaMalloc(size)
            if self._failed(code):
                free, total = torch.cuda.mem_get_info(self._device)
                raise WeightSyncError(
                    f"{size / 2**20:.0f} MiB for the ring of weight buckets can't be allocated on {self._device}: "
                    f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB are free ({self._in_words(code)})",
                    hint="lower rollout.weight_transport.buckets, or give the rollout less memory",
                )
            code, found = self._runtime.cudaIpcGetMemHandle(address)
            if self._failed(code):
                self._runtime.cudaFree(address)
                raise WeightSyncError(
                    f"memory of {self._device} can't be shared with other processes: {self._in_words(code)}",
                    hint="set rollout.weight_transport=shared_memory",
                )
        handle = ctypes.string_at(found.getPtr(), _HANDLE_BYTES)
        address = int(address)
        with _lock:
            _made[handle] = address
        return self._allocation(address, size, handle)

    def free(self, made: Allocation) -> None:
        """Free memory that `allocate` returned."""
        with _lock:
            _made.pop(made.handle, None)
        with torch.cuda.device(self._device):
            # Copies to and from this memory may still be queued, and torch's allocator does not track the memory.
            torch.cuda.synchronize(self._device)
            self._use_device()
            self._runtime.cudaFree(made.address)

    def open(self, handle: bytes, size: int, identity: str) -> Allocation:
        """Open memory that another process allocated on the device with this identity.

        Raises:
            WeightSyncError: the memory can't be opened from this device.
        """
        if len(handle) != _HANDLE_BYTES:
            raise WeightSyncError(
                f"the sender's IPC handle has {len(handle)} bytes; expected {_HANDLE_BYTES}"
            )
        with _lock:
            address = _made.get(handle)
            if address is None:
                known = _opened.get((handle, self._index))
                if known is None:
                    known = _Opened(self._open(handle, identity), 0)
                    _opened[handle, self._index] = known
                known.users += 1
                address = known.address
        return self._allocation(address, size, handle, mine=identity == self.identity)

    def shut(self, opened: Allocation) -> None:
        """Close memory that `open` returned; views of the memory become invalid."""
        with _lock:
            known = _opened.get((opened.handle, self._index))
            if known is None:
                return  # this process allocated the memory
            known.users -= 1
            if known.users:
                return
            del _opened[opened.handle, self._index]
            with torch.cuda.device(self._device):
                # As in `free`. The lock stays held, so that no `open` maps the handle again before it is closed.
                torch.cuda.synchronize(self._device)
                self._use_device()
                self._runtime.cudaIpcCloseMemHandle(opened.address)

    def staging(self, size: int) -> Tensor:
        """Return memory of this device, uint8 [size], to hold copies from another device."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def fetch(self, target: Tensor, source: Allocation, offset: int) -> None:
        """Queue a copy of n bytes of another device's memory to `target`, uint8 [n], on the current stream.

        Args:
            target: the memory that receives the bytes.
            source: the other device's memory.
            offset: the position in `source` at which the n bytes begin.
        """
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            self._use_device()
            (code,) = self._runtime.cudaMemcpyAsync(
                target.data_ptr(),
                source.address + offset,
                target.nbytes,
                self._runtime.cudaMemcpyKind.cudaMemcpyDefault,
                stream.cuda_stream,
            )
        if self._failed(code):
            raise WeightSyncError(
                f"a bucket can't be copied from the trainer's GPU to {self._device}: {self._in_words(code)}",
                hint="set rollout.weight_transport=nccl",
            )

    # -- the pieces ----------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return self._device.index or 0

    def _use_device(self) -> None:
        """Select this GPU in the CUDA runtime of the package `cuda-bindings`, which does not follow torch's selection by itself."""
        self._runtime.cudaSetDevice(self._index)

    def _open(self, handle: bytes, identity: str) -> int:
        wanted = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(wanted.getPtr(), handle, _HANDLE_BYTES)
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device)  # creates the device's context
            self._use_device()
            code, address = self._runtime.cudaIpcOpenMemHandle(
                wanted, self._runtime.cudaIpcMemLazyEnablePeerAccess
            )
        if self._failed(code):
            raise WeightSyncError(
                f"memory of the trainer's GPU {identity} can't be opened from {self._device} ({self.identity}): "
                f"{self._in_words(code)}",
                hint="set rollout.weight_transport=nccl if the GPUs have no peer access to each other, or "
                "rollout.weight_transport=shared_memory if the processes run in containers with separate IPC namespaces",
            )
        return int(address)

    def _allocation(
        self, address: int, size: int, handle: bytes, *, mine: bool = True
    ) -> Allocation:
        octets = None
        if mine:
            octets = torch.as_tensor(_Span(address, size), device=self._device)
        return Allocation(address=address, size=size, octets=octets, handle=handle)

    def _failed(self, code: Any) -> bool:
        return int(code) != 0

    def _in_words(self, code: object) -> str:
        _, text = self._runtime.cudaGetErrorString(code)
        return f"{getattr(code, 'name', code)}: {text.decode() if text else 'unknown'}"


class _Span:
    """A range of GPU memory as an object that torch can turn into a tensor without a copy (`__cuda_array_interface__`)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
