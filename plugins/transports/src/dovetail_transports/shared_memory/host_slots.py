"""Both ends of the ring in shared memory: its descriptor travels with the offer, and each side maps it once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail_transports.ring.channel import Channel
from dovetail_transports.ring.slots import Offer, Pulse, ReceiverSlots, SenderSlots, await_readers
from dovetail_transports.shared_memory.memory import SharedRing, new_memory, new_name


class SharedSenderSlots(SenderSlots):
    """Allocates the shared memory, and allocates it again where an update needs larger slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._ring: SharedRing | None = None
        self._memory: int | None = None

    def fit(self, slot_bytes: int) -> None:
        if self._ring is not None and self._ring.slot_bytes >= slot_bytes:
            return
        self.close()
        self._memory = new_memory(self.slots * slot_bytes)
        self._ring = SharedRing(self._memory, self.slots, slot_bytes, new_name())

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
            raise WeightSyncError("the shared memory of this transport has been closed")
        return self._ring


class SharedReceiverSlots(ReceiverSlots):
    """Maps the sender's memory.

    Args:
        device: into which the rollout copies.
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
                    f"the sender's buckets hold {offer['slot_bytes']} bytes; expected at least {slot_bytes}"
                )
            self._ring = SharedRing(
                descriptor, offer["slots"], offer["slot_bytes"], str(offer["ring"])
            )
            self._ring.pin(self._device)
        finally:
            os.close(descriptor)

    def collect(self, bucket: int, nbytes: int, pulse: Pulse) -> Tensor:
        if self._ring is None:
            raise WeightSyncError("the shared memory of this transport has been closed")
        return self._ring.slot(bucket)

    def through(self) -> None:
        await_readers(self._device)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
