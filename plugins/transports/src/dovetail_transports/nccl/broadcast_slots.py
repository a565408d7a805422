"""Both ends of a ring with slots in every process: a bucket is broadcast from the sender's slot into a slot of each receiver."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail_transports.nccl.agreement import agree, described
from dovetail_transports.nccl.group import BroadcastGroup, store_at, store_there
from dovetail_transports.nccl.tcp_rendezvous import listen_at
from dovetail_transports.ring.channel import Channel
from dovetail_transports.ring.slots import (
    DeliveryError,
    Offer,
    Pulse,
    ReceiverSlots,
    SenderSlots,
    await_readers,
)


class _Stage:
    """The slots of one process, in one tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = self.slot_bytes = 0
        self._octets: Tensor | None = None

    def fit(self, slots: int, slot_bytes: int) -> None:
        """Allocate `slots` slots of at least `slot_bytes` bytes each; keep the present slots if their number and size suffice."""
        if self._octets is not None and self.slots == slots and self.slot_bytes >= slot_bytes:
            return
        # The old slots are freed first, since old and new slots together may not fit into memory.
        self._octets = None
        self._octets = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=self.device)
        self.slots, self.slot_bytes = slots, slot_bytes

    def slot(self, bucket: int) -> Tensor:
        """Return the slot for the bucket with this index, uint8 [slot_bytes]."""
        if self._octets is None:
            raise WeightSyncError("the weight transport is closed, and its buckets are freed")
        return self._octets.narrow(0, bucket % self.slots * self.slot_bytes, self.slot_bytes)

    def close(self) -> None:
        """Release the memory."""
        self._octets = None


class BroadcastSenderSlots(SenderSlots):
    """The sender's end: broadcasts each bucket from its slot to the receivers.

    Forms the process group of sender and receivers, and a new group when the receivers change.

    Args:
        slots: the number of slots, that is, of buckets of weights that are in transit at once.
        device: the device of the buckets.
        backend: `nccl` or `gloo`.
        host: the address of the store through which members find each other.
        timeout: the time limit for forming the group and for each broadcast, in seconds.
    """

    collective = True

    def __init__(
        self, slots: int, device: torch.device, backend: str, host: str, timeout: float
    ) -> None:
        self.slots = slots
        self._stage = _Stage(device)
        self._backend, self._host, self._timeout = backend, host, timeout
        self._group: BroadcastGroup | None = None
        self._name: str | None = None
        self._members: tuple[str, ...] = ()
        self._store: Any = None
        self._port = 0
        self._given_up = False

    def fit(self, slot_bytes: int) -> None:
        self._stage.fit(self.slots, slot_bytes)

    def slot(self, bucket: int) -> Tensor:
        return self._stage.slot(bucket)

    def offers(self, states: Sequence[dict[str, Any]]) -> list[Offer]:
        self._given_up = False
        agree(described(self._backend), states)
        members = tuple(str(state["id"]) for state in states)
        kept = self._group is not None and all(state["group"] == self._name for state in states)
        if not kept or members != self._members:
            self._drop()
            self._members, self._name = members, secrets.token_hex(8)
            # The store must be new as well, since the old store still has the keys of the old group.
            listener = listen_at(self._host)
            self._port = int(listener.getsockname()[1])
            self._store = store_at(self._host, listener, self._timeout)
        shared = {
            "group": self._name,
            "host": self._host,
            "port": self._port,
            "size": len(members) + 1,
            "slots": self.slots,
            "slot_bytes": self._stage.slot_bytes,
        }
        return [Offer(message=shared | {"rank": number + 1}) for number in range(len(members))]

    def join(self, pulse: Pulse) -> None:
        if self._group is not None:
            return
        store = self._store
        if store is None:
            raise DeliveryError(
                "the sender's end of the weight transport was closed before the receivers had joined"
            )
        try:
            self._group = BroadcastGroup(
                backend=self._backend,
                store=lambda: store,
                rank=0,
                size=len(self._members) + 1,
                device=self._stage.device,
                host=self._host,
                timeout=self._timeout,
                pulse=pulse,
            )
        except BaseException:
            self._drop()
            raise

    def deliver(self, bucket: int, nbytes: int) -> None:
        group = self._group
        if group is None:
            raise DeliveryError("the process group of sender and receivers was closed too early")
        if nbytes:
            group.broadcast(self.slot(bucket).narrow(0, 0, nbytes), self._watch)

    def abort(self) -> None:
        self._given_up = True
        self._drop()

    def close(self) -> None:
        self._drop()
        self._stage.close()

    def _watch(self) -> None:
        if self._given_up:
            raise DeliveryError("the update was cancelled during the transfer of a bucket")

    def _drop(self) -> None:
        group, self._group = self._group, None
        self._name, self._members, self._store = None, (), None
        if group is not None:
            group.abort()


class BroadcastReceiverSlots(ReceiverSlots):
    """A receiver's end: receives each broadcast bucket in a slot of its own.

    Joins the process group that the sender forms, and stays a member between updates.

    Args:
        device: the device of the received buckets.
        backend: the sender's backend.
        timeout: the time limit for forming the group and for each broadcast, in seconds.
    """

    collective = True

    def __init__(self, device: torch.device, backend: str, timeout: float) -> None:
        self._stage = _Stage(device)
        self._backend, self._timeout = backend, timeout
        self._id = secrets.token_hex(8)
        self._group: BroadcastGroup | None = None
        self._name: str | None = None

    def state(self) -> dict[str, Any]:
        return {"id": self._id, "group": self._name, **described(self._backend)}

    def open(self, offer: dict[str, Any], channel: Channel, slot_bytes: int, pulse: Pulse) -> None:
        if offer["slot_bytes"] < slot_bytes:
            raise WeightSyncError(
                f"each of the sender's buckets has {offer['slot_bytes']} bytes; this update needs at least {slot_bytes}"
            )
        self._stage.fit(int(offer["slots"]), int(offer["slot_bytes"]))
        if self._group is not None and self._name == offer["group"]:
            return
        self._drop()
        host, port, timeout = str(offer["host"]), int(offer["port"]), self._timeout
        self._group = BroadcastGroup(
            backend=self._backend,
            store=lambda: store_there(host, port, timeout),
            rank=int(offer["rank"]),
            size=int(offer["size"]),
            device=self._stage.device,
            host=channel.own_address(),
            timeout=timeout,
            pulse=pulse,
        )
        self._name = str(offer["group"])

    def collect(self, bucket: int, nbytes: int, pulse: Pulse) -> Tensor:
        slot = self._stage.slot(bucket)
        if self._group is None:
            raise DeliveryError("the process group of sender and receivers was closed too early")
        if nbytes:
            try:
                self._group.broadcast(slot.narrow(0, 0, nbytes), pulse)
            except BaseException:
                self._drop()
                raise
        return slot

    def through(self) -> None:
        await_readers(self._stage.device)

    def close(self) -> None:
        self._drop()
        self._stage.close()

    def _drop(self) -> None:
        group, self._group, self._name = self._group, None, None
        if group is not None:
            group.abort()
