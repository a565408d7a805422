"""The plugin: both ends of the transport for processes of one machine, a ring of buckets in memory that they map.

The memory has no name in any file system. Its descriptor is sent over the socket between the two sides, and the kernel
frees the memory when the last process that holds it ends. The memory does not count against the size of `/dev/shm`,
which containers often limit to 64 MiB.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.ring.channel import Channel
from dovetail_transports.ring.local import LocalTransport
from dovetail_transports.ring.slots import Offer, Pulse, ReceiverSlots, SenderSlots, await_readers

_HOST_REGISTER_DEFAULT = 0


class SharedRing:
    """A ring of slots, each for one bucket of weights, in memory that several processes map.

    Args:
        descriptor: the file descriptor of the memory; the ring does not keep the descriptor.
        slots: the number of slots.
        slot_bytes: the size of each slot in bytes, a multiple of the page size.
        name: an identifier of the ring, by which a receiver sees whether it has opened this ring already.
    """

    def __init__(self, descriptor: int, slots: int, slot_bytes: int, name: str) -> None:
        self.name, self.slots, self.slot_bytes = name, slots, slot_bytes
        if os.fstat(descriptor).st_size < slots * slot_bytes:
            raise WeightSyncError(
                f"the sender's shared memory has {os.fstat(descriptor).st_size} bytes; expected "
                f"{slots} buckets of {slot_bytes}"
            )
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, slots * slot_bytes)
        with suppress(
            OSError, AttributeError
        ):  # huge pages need fewer page faults and look-ups, if the kernel grants them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._octets: Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = False

    def slot(self, bucket: int) -> Tensor:
        """Return the slot for the bucket with this index, uint8 [slot_bytes]."""
        if self._octets is None:
            raise WeightSyncError("the weight transport is closed, and its shared memory is freed")
        return self._octets.narrow(0, bucket % self.slots * self.slot_bytes, self.slot_bytes)

    def pin(self, device: torch.device) -> None:
        """Register the memory as pinned with a CUDA device, for direct copies; do nothing for other devices."""
        if device.type != "cuda" or self._pinned or self._octets is None:
            return
        with torch.cuda.device(device):
            code = _cudart().cudaHostRegister(
                self._octets.data_ptr(), self._octets.nbytes, _HOST_REGISTER_DEFAULT
            )
        self._pinned = int(code) == 0

    def close(self) -> None:
        """Unmap the memory: now, or when its last view is gone."""
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
            f"{size} bytes of shared memory can't be allocated: {error}",
            hint="lower rollout.weight_transport.buckets",
        ) from error
    return descriptor


def _cudart() -> Any:
    runtime: Any = torch.cuda
    return runtime.cudart()


class SharedSenderSlots(SenderSlots):
    """Allocates a ring of slots, each for one bucket of weights, in shared memory; a larger ring if an update needs larger slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._ring: SharedRing | None = None
        self._memory: int | None = None

    def fit(self, slot_bytes: int) -> None:
        if self._ring is not None and self._ring.slot_bytes >= slot_bytes:
            return
        self.close()
        self._memory = new_memory(self.slots * slot_bytes)
        self._ring = SharedRing(self._memory, self.slots, slot_bytes, secrets.token_hex(8))

    def slot(self, bucket: int) -> Tensor:
        return self._made().slot(bucket)

    def pin(self, device: torch.device) -> None:
        self._made().pin(device)

    def offers(self, states: Sequence[dict[str, Any]]) -> list[Offer]:
        ring = self._made()
        message = {"ring": ring.name, "slots": ring.slots, "slot_bytes": ring.slot_bytes}
        return [Offer(message=message, descriptor=self._memory) for _ in states]

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _made(self) -> SharedRing:
        if self._ring is None:
            raise WeightSyncError("the weight transport is closed, and its shared memory is freed")
        return self._ring


class SharedReceiverSlots(ReceiverSlots):
    """Maps the shared memory of the sender's ring, and returns the bucket of weights that a slot holds.

    Args:
        device: the device to which the rollout copies the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: SharedRing | None = None

    def open(self, offer: dict[str, Any], channel: Channel, slot_bytes: int, pulse: Pulse) -> None:
        descriptor = channel.take_descriptor()
        try:
            if self._ring is not None and self._ring.name == offer["ring"]:
                return
            self.close()
            if offer["slot_bytes"] < slot_bytes:
                raise WeightSyncError(
                    f"each of the sender's buckets has {offer['slot_bytes']} bytes; this update needs at least {slot_bytes}"
                )
            self._ring = SharedRing(
                descriptor, offer["slots"], offer["slot_bytes"], str(offer["ring"])
            )
            self._ring.pin(self._device)
        finally:
            os.close(descriptor)

    def collect(self, bucket: int, nbytes: int, pulse: Pulse) -> Tensor:
        if self._ring is None:
            raise WeightSyncError("the weight transport is closed, and its shared memory is freed")
        return self._ring.slot(bucket)

    def through(self) -> None:
        await_readers(self._device)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None


class SharedMemoryTransport(LocalTransport):
    """Sends weights to processes of the same machine through memory that they share.

    The sender fills a ring of buckets while receivers read, so no second copy of the model exists during an update.
    """

    name = "shared_memory"
    api = ">=1.5,<2"
    capabilities = frozenset({"across_processes", "on_each_machine", "ends_meet"})
    Config = SharedMemoryConfig

    def sender_slots(self) -> SenderSlots:
        return SharedSenderSlots(self.config.buckets)

    def receiver_slots(self) -> ReceiverSlots:
        return SharedReceiverSlots(torch.device(self.context.device))
