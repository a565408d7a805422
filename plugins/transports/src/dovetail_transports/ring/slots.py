"""The two ends of a ring of slots, as a transport implements them: storing buckets, and delivering them to receivers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail_transports.ring.channel import Channel

Pulse = Callable[[], None]
"""A function that is called repeatedly while waiting; it raises an error to end a hopeless wait."""


class DeliveryError(WeightSyncError):
    """A bucket could not be delivered to all receivers."""


@attrs.frozen(kw_only=True)
class Offer:
    """The sender's description of the ring, with which a receiver opens it."""

    message: dict[str, Any]
    """The description as JSON values."""
    descriptor: int | None = None
    """File descriptor that is sent with the description, if both sides are on one machine."""


class SenderSlots(ABC):
    """The trainer's end of a ring of slots, through which the buckets of an update pass; kept between updates."""

    collective: ClassVar[bool] = False
    """Whether all receivers take part in every delivery, so that a lost receiver stops the update for all."""
    slots: int
    """Number of slots, each for one bucket, and so of buckets in transit at once."""

    @abstractmethod
    def fit(self, slot_bytes: int) -> None:
        """Grow every slot to at least `slot_bytes` bytes.

        Raises:
            WeightSyncError: there is not enough memory.
        """

    @abstractmethod
    def slot(self, bucket: int) -> Tensor:
        """Return the slot for the bucket with this index, uint8 [slot_bytes]."""

    @abstractmethod
    def offers(self, states: Sequence[dict[str, Any]]) -> list[Offer]:
        """Return a description of the ring for each receiver, in the order of `states`: the results of the receivers' `state`."""

    def pin(self, device: torch.device) -> None:
        """Prepare the slots for fast copies from this device."""

    def join(self, pulse: Pulse) -> None:
        """Connect to the receivers of the update, which have got their offers and now open the ring."""

    def deliver(self, bucket: int, nbytes: int) -> None:
        """Deliver the first `nbytes` of a bucket to the receivers, which know its index and size, and wait for the end of the transfer.

        Raises:
            DeliveryError: the bucket did not reach all receivers.
        """

    def abort(self) -> None:
        """End `deliver` and `join` with an error after the update has failed. Called from another thread."""

    def settle(self) -> None:
        """Free older rings, since every receiver has opened the ring offered last."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


class ReceiverSlots(ABC):
    """A rollout's end of the trainer's ring of slots (`SenderSlots`), kept between updates."""

    collective: ClassVar[bool] = False
    """Whether all receivers take part in every delivery, as in `SenderSlots`. If so, a receiver that failed still takes part in the
    update's remaining deliveries.
    """

    def state(self) -> dict[str, Any]:
        """Return the state of this end as JSON values, from which the sender makes its offer."""
        return {}

    @abstractmethod
    def open(self, offer: dict[str, Any], channel: Channel, slot_bytes: int, pulse: Pulse) -> None:
        """Open the ring that the sender offers, unless it is open already.

        Args:
            offer: the message of the sender's `Offer`.
            channel: the channel to the sender, which may carry a file descriptor.
            slot_bytes: the minimum size of a slot, in bytes.
            pulse: see `Pulse`.

        Raises:
            WeightSyncError: the ring can't be opened, or is too small.
            PeerGone: the sender has closed the connection.
        """

    @abstractmethod
    def collect(self, bucket: int, nbytes: int, pulse: Pulse) -> Tensor:
        """Return the bytes of the bucket that the sender has announced, uint8 [at least nbytes], valid until `through` is called."""

    def through(self) -> None:
        """Wait until all queued work that reads the bucket has finished."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


def numbered(device: torch.device) -> torch.device:
    """Return the device with an index: if it has none, that of the current accelerator. A CPU is returned unchanged."""
    if device.type == "cpu" or ":" in str(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def await_readers(device: torch.device) -> None:
    """Wait for the pending work of an accelerator's current stream."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
