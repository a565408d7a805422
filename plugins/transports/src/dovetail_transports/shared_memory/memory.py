"""SharedRing: some slots of shared memory, each of which holds a bucket.

The memory has no name in any file system: its descriptor travels over the socket on which the two sides talk, and the
kernel frees it when the last process that has it ends, however it ends. It does not count against the size of
`/dev/shm`, which containers often keep at 64 MiB.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError

_HOST_REGISTER_DEFAULT = 0


class SharedRing:
    """Slots in memory that several processes map.

    Args:
        descriptor: the descriptor of the memory; the ring does not keep it.
        slots: the number of slots.
        slot_bytes: the size of each, in whole pages.
        name: identifies the ring.
    """

    def __init__(self, descriptor: int, slots: int, slot_bytes: int, name: str) -> None:
        self.name, self.slots, self.slot_bytes = name, slots, slot_bytes
        if os.fstat(descriptor).st_size < slots * slot_bytes:
            raise WeightSyncError(
                f"the shared memory that came has {os.fstat(descriptor).st_size} bytes in place of "
                f"{slots} × {slot_bytes}"
            )
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, slots * slot_bytes)
        with suppress(
            OSError, AttributeError
        ):  # fewer faults and look-ups where the kernel grants it
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._octets: Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = False

    def slot(self, bucket: int) -> Tensor:
        """Return uint8 [slot_bytes]: the slot for the bucket of this number."""
        if self._octets is None:
            raise WeightSyncError("the shared memory of this transport has been closed")
        return self._octets.narrow(0, bucket % self.slots * self.slot_bytes, self.slot_bytes)

    def pin(self, device: torch.device) -> None:
        """Register the memory with an accelerator that can copy to and from it by itself; others copy as they can."""
        if device.type != "cuda" or self._pinned or self._octets is None:
            return
        with torch.cuda.device(device):
            code = _cudart().cudaHostRegister(
                self._octets.data_ptr(), self._octets.nbytes, _HOST_REGISTER_DEFAULT
            )
        self._pinned = int(code) == 0

    def close(self) -> None:
        """Unmap the memory; existing views keep it mapped."""
        if self._pinned and self._octets is not None:
            _cudart().cudaHostUnregister(self._octets.data_ptr())
            self._pinned = False
        self._octets = None
        if self._memory is not None:
            with suppress(BufferError):  # unmapped with the last view
                self._memory.close()
            self._memory = None


def new_memory(size: int) -> int:
    """Return the descriptor of `size` bytes of anonymous shared memory.

    Raises:
        WeightSyncError: there is not enough memory.
    """
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("dovetail-weights", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise WeightSyncError(
            f"{size} bytes of shared memory can't be had: {error}",
            hint="lower rollout.weight_transport.buckets",
        ) from error
    return descriptor


def _cudart() -> Any:
    runtime: Any = torch.cuda
    return runtime.cudart()


def new_name() -> str:
    """Return a name for a ring."""
    return secrets.token_hex(8)
