"""The plugin: both ends of the transport for processes on one GPU, or on GPUs of one machine with peer access.

The ring in the device's memory is exported once, opened once, and read in place or through a copy on the reader's GPU.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import ConfigError, WeightSyncError
from dovetail_transports.config import CudaIpcConfig
from dovetail_transports.cuda_ipc.cuda_memory import Allocation, CudaMemory
from dovetail_transports.ring.channel import Channel
from dovetail_transports.ring.local import LocalTransport
from dovetail_transports.ring.slots import (
    Offer,
    Pulse,
    ReceiverSlots,
    SenderSlots,
    await_readers,
    numbered,
)

_CLOSED = "the weight transport is closed, and its GPU memory is freed"


class DeviceSenderSlots(SenderSlots):
    """Allocates a ring of slots, each for one bucket of weights, in the trainer's GPU memory.

    If an update needs larger slots, a larger ring is allocated. The old ring is freed after that update, since receivers close the old
    ring when they open the new one.
    """

    def __init__(self, slots: int, memory: CudaMemory) -> None:
        self.slots = slots
        self._memory = memory
        self._made: Allocation | None = None
        self._former: list[Allocation] = []
        self._slot_bytes = 0
        self._name = ""

    def fit(self, slot_bytes: int) -> None:
        if self._made is not None and self._slot_bytes >= slot_bytes:
            return
        if self._made is not None:
            self._former.append(self._made)
            self._made = None
        self._made = self._memory.allocate(self.slots * slot_bytes)
        self._slot_bytes, self._name = slot_bytes, secrets.token_hex(8)

    def slot(self, bucket: int) -> Tensor:
        if self._made is None or self._made.octets is None:
            raise WeightSyncError(_CLOSED)
        return self._made.octets.narrow(0, bucket % self.slots * self._slot_bytes, self._slot_bytes)

    def offers(self, states: Sequence[dict[str, Any]]) -> list[Offer]:
        if self._made is None:
            raise WeightSyncError(_CLOSED)
        message = {
            "ring": self._name,
            "slots": self.slots,
            "slot_bytes": self._slot_bytes,
            "handle": self._made.handle.hex(),
            "device": self._memory.identity,
        }
        return [Offer(message=message) for _ in states]

    def settle(self) -> None:
        while self._former:
            self._memory.free(self._former.pop())

    def close(self) -> None:
        self.settle()
        if self._made is not None:
            self._memory.free(self._made)
            self._made = None


class DeviceReceiverSlots(ReceiverSlots):
    """Opens the sender's ring of slots in GPU memory, and returns the bucket of weights that a slot holds.

    Args:
        device: the device of the rollout.
        memory: the memory of that device.
    """

    def __init__(self, device: torch.device, memory: CudaMemory) -> None:
        self._device, self._memory = device, memory
        self._opened: Allocation | None = None
        self._stage: Tensor | None = None
        self._slots = self._slot_bytes = 0
        self._name = ""

    def open(self, offer: dict[str, Any], channel: Channel, slot_bytes: int, pulse: Pulse) -> None:
        if self._opened is not None and self._name == offer["ring"]:
            return
        self.close()
        self._slots, self._slot_bytes = int(offer["slots"]), int(offer["slot_bytes"])
        if self._slot_bytes < slot_bytes:
            raise WeightSyncError(
                f"each of the sender's buckets has {self._slot_bytes} bytes; this update needs at least {slot_bytes}"
            )
        size = self._slots * self._slot_bytes
        self._opened = self._memory.open(bytes.fromhex(offer["handle"]), size, str(offer["device"]))
        if self._opened.octets is None:
            self._stage = self._memory.staging(self._slot_bytes)
        self._name = str(offer["ring"])

    def collect(self, bucket: int, nbytes: int, pulse: Pulse) -> Tensor:
        if self._opened is None:
            raise WeightSyncError(_CLOSED)
        start = bucket % self._slots * self._slot_bytes
        if self._opened.octets is not None:
            return self._opened.octets.narrow(0, start, self._slot_bytes)
        if self._stage is None:
            raise WeightSyncError(_CLOSED)
        # Copied once over the link between the devices; digests and the rollout then read the copy in `_stage`.
        if nbytes:
            self._memory.fetch(self._stage.narrow(0, 0, nbytes), self._opened, start)
        return self._stage

    def through(self) -> None:
        await_readers(self._device)

    def close(self) -> None:
        self._stage = None
        if self._opened is not None:
            self._memory.shut(self._opened)
            self._opened = None


class CudaIpcTransport(LocalTransport):
    """Sends weights through memory of the trainer's GPU, which the rollout's processes open.

    The trainer packs the weights into a small ring of buckets in its GPU's memory. Processes on the same GPU read the
    buckets in place. Processes on other GPUs of the machine copy each bucket over the link between the GPUs.
    """

    name = "cuda_ipc"
    api = ">=1.5,<2"
    capabilities = frozenset({"across_processes", "on_each_machine", "ends_meet"})
    Config = CudaIpcConfig

    def memory(self, device: torch.device) -> CudaMemory:
        """Return the memory of this process's device.

        Raises:
            ConfigError: the device is not a CUDA GPU.
        """
        if device.type != "cuda":
            raise ConfigError(
                f"the cuda_ipc transport connects processes on CUDA GPUs, but this process (role "
                f"{self.context.role or 'none'!r}) is on {str(device)!r}",
                hint="set rollout.weight_transport=shared_memory",
            )
        return CudaMemory(device)

    def sender_slots(self) -> SenderSlots:
        return DeviceSenderSlots(
            self.config.buckets, self.memory(numbered(torch.device(self.context.device)))
        )

    def receiver_slots(self) -> ReceiverSlots:
        device = numbered(torch.device(self.context.device))
        return DeviceReceiverSlots(device, self.memory(device))
