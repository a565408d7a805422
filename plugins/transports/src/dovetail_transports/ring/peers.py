"""Peers: the sender's view of the receivers of one update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import attrs

from dovetail.errors import ReceiverError
from dovetail_transports.ring.channel import Channel, PeerGone

_GRACE_SECONDS = 0.1


@attrs.define(eq=False)
class Peer:
    """The state of one receiver during an update."""

    who: str
    channel: Channel
    ready: bool = False
    """Whether the receiver takes part in this update."""
    state: dict[str, Any] = attrs.field(factory=dict)
    """The state of the receiver's end of the ring, as the receiver reported it."""
    done: int = 0
    """Number of buckets that the receiver has finished."""
    fault: str | None = None
    """Why the receiver failed or refused the update, as the predicate of a sentence in an error; None if it did neither."""
    lost: bool = False
    """Whether the receiver has failed or refused so that it takes no part in further deliveries."""
    refused: bool = False
    """Whether the receiver refused this update although it connected for it; False if it waited for another update."""


class Peers:
    """The receivers of an update.

    Args:
        version: the version of the update.
        timeout: seconds that each receiver may take to answer.
        collective: whether a lost receiver stops the update for all receivers.
    """

    def __init__(self, version: int, timeout: float, *, collective: bool) -> None:
        self._version, self._timeout, self._collective = version, timeout, collective
        self._peers: list[Peer] = []
        self._buckets: int | None = None

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, peer: Peer) -> None:
        """Add a receiver that has connected."""
        self._peers.append(peer)

    def expect(self, buckets: int) -> None:
        """Set the number of buckets that complete the update."""
        self._buckets = buckets

    def keep(self, peers: list[Peer]) -> None:
        """Keep only these receivers, and close the channels of all others."""
        for peer in self._peers:
            if peer not in peers:
                peer.channel.close()
        self._peers = peers

    def close(self) -> None:
        """Close all channels."""
        for peer in self._peers:
            peer.channel.close()

    # -- messages --------------------------------------------------------------------------------

    def tell(self, peer: Peer, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message to one receiver, unless the receiver has failed."""
        if peer.fault is not None:
            return
        try:
            peer.channel.send(message, descriptor)
        except PeerGone:
            return  # reported after the peer's last messages have been read
        except TimeoutError:
            peer.fault, peer.lost = f"read nothing for {self._timeout:g} seconds", True

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send a message to every receiver that has not failed."""
        for peer in self._peers:
            self.tell(peer, message)

    def broke_off(self, reason: str, *, called_off: bool) -> None:
        """Notify waiting receivers that the update was aborted.

        Args:
            reason: the reason, which receivers show in their errors.
            called_off: whether the update was aborted before its start, because a receiver will not connect.
        """
        for peer in self._peers:
            if peer.fault is None:
                with suppress(PeerGone, TimeoutError):
                    peer.channel.send({"broke_off": reason, "called_off": called_off})

    def listen(self) -> None:
        """Read the messages that have arrived, without waiting."""
        for peer in self._peers:
            while peer.fault is None and not self._whole(peer) and peer.channel.waiting():
                self._hear(peer, time.monotonic() + self._timeout)

    def check(self) -> None:
        """Read the messages that have arrived, and raise an error if the update can't continue.

        Raises:
            ReceiverError: a receiver is lost, and the update is `collective`, so that no other receiver can complete it.
        """
        self.listen()
        if self._collective and any(peer.lost for peer in self._peers):
            # A lost receiver makes others fail. A moment later their faults are known, and the error names all of them.
            time.sleep(_GRACE_SECONDS)
            self.listen()
            raise ReceiverError(
                f"weight update {self._version} broke off, since it needs all its receivers and some "
                f"failed: {self.faults()}",
                hint="no receiver has the complete update; send it again once all receivers run",
            )

    def blame(self, seconds: float) -> None:
        """Raise the error of the receiver that failed, waiting up to `seconds` to find out which; return if none has failed.

        Raises:
            ReceiverError: as in `check`.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)

    def await_done(self, count: int) -> None:
        """Wait until every active receiver has finished `count` buckets.

        Raises:
            ReceiverError: all receivers have failed, or one is lost and the update is `collective`.
        """
        deadline = time.monotonic() + self._timeout
        for peer in self._peers:
            while peer.fault is None and (peer.done < count or not peer.ready):
                if not self._hear(peer, deadline):
                    peer.lost = True
                    peer.fault = f"did not finish within {self._timeout:g} seconds: it has received {peer.done} bucket(s)"
        self.check()
        if all(peer.fault is not None for peer in self._peers):
            raise ReceiverError(
                f"weight update {self._version} reached none of its receivers ({len(self._peers)}): {self.faults()}",
                hint="send the update again once the receivers run",
            )

    def faults(self) -> str:
        """Return the failed receivers and why each failed, as text for an error; empty if none has failed."""
        return "; ".join(
            f"{peer.who} {peer.fault}" for peer in self._peers if peer.fault is not None
        )

    # -- the pieces ----------------------------------------------------------------------------

    def _whole(self, peer: Peer) -> bool:
        return peer.ready and self._buckets is not None and peer.done >= self._buckets

    def _hear(self, peer: Peer, deadline: float) -> bool:
        """Read a peer's next message; return False if no message arrived in time."""
        try:
            message = peer.channel.receive(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            return False
        except PeerGone:
            peer.fault = peer.fault or "ended or closed the connection during the update"
            peer.lost = True
            return True
        if "refused" in message:
            peer.fault = f"refused it: {message['refused']}"
            peer.refused = not message.get("elsewhere")
            peer.lost = not message.get("to_the_end")
        elif "ready" in message:
            peer.ready, peer.state = True, message["ready"]
        else:
            peer.done = int(message["done"])
        return True
