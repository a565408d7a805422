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
"""A function that is called repeatedly while waiting; it raises once the wait is in vain."""


class DeliveryError(WeightSyncError):
    """A bucket could not be brought to all receivers."""


@attrs.frozen(kw_only=True)
class Offer:
    """The description with which a receiver opens the ring."""

    message: dict[str, Any]
    """The description as JSON values."""
    descriptor: int | None = None
    """File descriptor that is sent along, where both sides are on one machine."""


class SenderSlots(ABC):
    """The trainer's ring. It is kept between updates."""

    collective: ClassVar[bool] = False
    """Whether all receivers take part in every delivery: one that is gone in the middle stops the others."""
    slots: int
    """Number of buckets in transit at once."""

    @abstractmethod
    def fit(self, slot_bytes: int) -> None:
        """Grow every slot to at least `slot_bytes`.

        Raises:
            WeightSyncError: there is not enough memory.
        """

    @abstractmethod
    def slot(self, bucket: int) -> Tensor:
        """Return uint8 [slot_bytes]: the slot for the bucket of this number."""

    @abstractmethod
    def offers(self, states: Sequence[dict[str, Any]]) -> list[Offer]:
        """Return the ring's description for each receiver, given the receivers' states (`ReceiverSlots.state`)."""

    def pin(self, device: torch.device) -> None:
        """Prepare the slots for fast copies from this device."""

    def join(self, pulse: Pulse) -> None:
        """Join the receivers of the update, which have their offers and open their ends now."""

    def deliver(self, bucket: int, nbytes: int) -> None:
        """Deliver the first bytes of an announced bucket to the receivers; returns when its slot has been read.

        Raises:
            DeliveryError: not all receivers took it.
        """

    def abort(self) -> None:
        """End `deliver` and `join` with an error, since the update has failed. Called from another thread."""

    def settle(self) -> None:
        """Free the rings before the last one offered, which every receiver has opened."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


class ReceiverSlots(ABC):
    """A rollout's end of the ring. It is kept between updates."""

    collective: ClassVar[bool] = False
    """Whether all receivers take part in every delivery, as in `SenderSlots`; a receiver that gives up still takes part to the end."""

    def state(self) -> dict[str, Any]:
        """Return the state of this end as JSON, from which the sender makes its offer."""
        return {}

    @abstractmethod
    def open(self, offer: dict[str, Any], channel: Channel, slot_bytes: int, pulse: Pulse) -> None:
        """Open the offered ring, unless it is open, for buckets of at most `slot_bytes`.

        Raises:
            WeightSyncError: the ring can't be opened, or is too small.
            PeerGone: the sender has closed the connection.
        """

    @abstractmethod
    def collect(self, bucket: int, nbytes: int, pulse: Pulse) -> Tensor:
        """Return uint8 [at least nbytes]: the bytes of an announced bucket; valid until `through` is called."""

    def through(self) -> None:
        """Return when everything that was queued to read the bucket has read it."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; safe to call twice."""


def numbered(device: torch.device) -> torch.device:
    """Return the device with an index: that of the current device where it has none."""
    if device.type == "cpu" or ":" in str(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def await_readers(device: torch.device) -> None:
    """Wait for the pending work of an accelerator's current stream."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
