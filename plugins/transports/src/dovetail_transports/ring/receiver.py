"""The rollout's end: opens the ring, verifies each bucket, and yields its tensors as views."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

from torch import Tensor

from dovetail.errors import CalledOffError, WeightSyncError
from dovetail.interfaces import WeightManifest, WeightReceiver
from dovetail_rollouts import Bucket
from dovetail_transports.config import RingConfig
from dovetail_transports.ring.channel import Channel, PeerGone
from dovetail_transports.ring.layout import BucketLayout, extent
from dovetail_transports.ring.rendezvous import ReceiverRendezvous
from dovetail_transports.ring.slots import DeliveryError, ReceiverSlots


class RingReceiver(WeightReceiver):
    """Receives updates through a ring of buckets.

    Tensors are views of memory that the sender reuses. A tensor is valid until the next tensor is requested; work that was queued by then
    on the device's current stream may still read it.

    Args:
        rendezvous: the means by which the receiver and its sender connect.
        slots: the receiver's end of the ring of slots, each of which holds one bucket.
    """

    lasting: ClassVar[bool] = False

    def __init__(
        self, config: RingConfig, rendezvous: ReceiverRendezvous, slots: ReceiverSlots
    ) -> None:
        self._config, self._rendezvous, self._slots = config, rendezvous, slots

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        layout = BucketLayout.of(manifest)
        coming = _Coming(self._meet(manifest, layout), manifest, self._config.timeout)
        taken = 0
        try:
            offer = coming.next("slots")
            self._slots.open(offer, coming.channel, layout.slot_bytes, coming.pulse)
            for number, places in enumerate(layout.buckets):
                digests = self._digests(coming, manifest, number)
                octets = self._slots.collect(number, extent(places), coming.pulse)
                taken = number + 1
                bucket = Bucket(
                    tuple((place.spec.name, place.view(octets)) for place in places), digests
                )
                bucket.verify(manifest.version)
                yield from bucket.tensors
                self._slots.through()
                with suppress(PeerGone):
                    # A sender that is gone after the last bucket failed because of another receiver; this receiver has the update.
                    coming.channel.send({"done": number + 1})
        except PeerGone as error:
            raise _broken(manifest, "the sender ended or closed the connection") from error
        except DeliveryError as error:
            with suppress(PeerGone, TimeoutError):
                coming.channel.send({"refused": error.message})
            raise _broken(manifest, error.message, hint=error.hint) from error
        except BaseException as error:
            reason = "it stopped receiving" if isinstance(error, GeneratorExit) else str(error)
            with suppress(PeerGone, TimeoutError, WeightSyncError):
                self._give_up(reason, layout, coming, manifest, taken)
            raise
        finally:
            coming.channel.close()

    def close(self) -> None:
        self._rendezvous.close()
        self._slots.close()

    # -- the pieces ----------------------------------------------------------------------------

    def _meet(self, manifest: WeightManifest, layout: BucketLayout) -> Channel:
        """Wait for the sender to connect for this update, and return its channel; senders of other updates are refused.

        Raises:
            WeightSyncError: no sender connected in time, the update has already ended, or the sender's manifest differs from this one.
        """
        timeout = self._config.timeout
        deadline = time.monotonic() + timeout
        others: list[int] = []
        while True:
            try:
                channel = self._rendezvous.accept(manifest, deadline - time.monotonic(), timeout)
            except TimeoutError as error:
                raise self._nobody_came(manifest, others) from error
            hello = _hello(channel, deadline)
            if hello is not None and "over" in hello:
                channel.close()
                raise _given_up(manifest, hello["over"], hello)
            if hello is not None and hello["update_id"] == manifest.update_id:
                if hello["fingerprint"] == layout.fingerprint:
                    with suppress(PeerGone):
                        channel.send({"ready": self._slots.state()})
                    return channel
                reason = f"the manifests of weight update {manifest.version} differ between sender and receiver"
                _refuse(channel, reason)
                raise WeightSyncError(
                    reason, hint="pass the same manifest to send_weights and receive_weights"
                )
            if hello is not None:
                others.append(hello["version"])
                reason = f"it waits for another weight update, {manifest.version}"
                _refuse(channel, reason, elsewhere=True)
            channel.close()

    def _nobody_came(self, manifest: WeightManifest, others: list[int]) -> WeightSyncError:
        seen = f"; other updates arrived: {others}" if others else ""
        return WeightSyncError(
            f"weight update {manifest.version} did not arrive within {self._config.timeout:g} seconds: no sender "
            f"connected at {self._rendezvous.place}{seen}",
            hint=self._rendezvous.hint,
        )

    def _digests(self, coming: _Coming, manifest: WeightManifest, number: int) -> tuple[int, ...]:
        """Wait until the sender announces the bucket with index `number`, and return the digests of its tensors."""
        message = coming.next("bucket")
        if message["bucket"] != number:
            raise _broken(manifest, f"bucket {message['bucket']} arrived; expected bucket {number}")
        digests = tuple(int(digest, 16) for digest in message["digests"])
        if self._config.verify and not digests:
            raise WeightSyncError(
                f"weight update {manifest.version} arrived without digests, which this receiver verifies",
                hint="give both sides the same rollout.weight_transport.verify",
            )
        return digests

    def _give_up(
        self,
        reason: str,
        layout: BucketLayout,
        coming: _Coming,
        manifest: WeightManifest,
        taken: int,
    ) -> None:
        """Refuse the update with a reason that is sent to the sender.

        If deliveries are collective and the first one has happened, this receiver first takes part in all remaining deliveries, so that
        the other receivers get the update.

        Args:
            reason: the reason.
            layout: the layout of the update's buckets.
            coming: the sender's messages.
            manifest: the manifest of the update.
            taken: the number of buckets that this receiver has received.
        """
        if not self._slots.collective or not taken:
            coming.channel.send({"refused": reason})
            return
        for number in range(taken, len(layout.buckets)):
            coming.channel.send({"done": number})
            coming.next("bucket")
            self._slots.collect(number, extent(layout.buckets[number]), coming.pulse)
        coming.channel.send({"refused": reason, "to_the_end": True})


class _Coming:
    """Receives the sender's messages in order. An abort raises as soon as it is read, even if earlier messages are not handled yet."""

    def __init__(self, channel: Channel, manifest: WeightManifest, timeout: float) -> None:
        self.channel = channel
        self._manifest, self._timeout = manifest, timeout
        self._early: deque[dict[str, Any]] = deque()

    def next(self, key: str) -> dict[str, Any]:
        """Wait for the message that has this key.

        Raises:
            WeightSyncError: another message arrived, the sender aborted the update, or no message arrived in time.
            PeerGone: the sender has closed the connection.
        """
        message = self._early.popleft() if self._early else self._take(key)
        if key not in message:
            raise _broken(self._manifest, f"{message} arrived; expected a message with {key!r}")
        return message["slots"] if key == "slots" else message

    def pulse(self) -> None:
        """Raise if the sender has aborted the update or is gone."""
        while self.channel.waiting():
            self._early.append(self._take("bucket"))

    def _take(self, key: str) -> dict[str, Any]:
        try:
            message = self.channel.receive(self._timeout)
        except TimeoutError as error:
            raise _broken(
                self._manifest, f"no message with {key!r} arrived within {self._timeout:g} seconds"
            ) from error
        if "broke_off" in message:
            raise _given_up(self._manifest, message["broke_off"], message)
        return message


def _hello(channel: Channel, deadline: float) -> dict[str, Any] | None:
    """Return the sender's first message; None if the sender left without a message."""
    try:
        hello = channel.receive(max(deadline - time.monotonic(), 0.0))
    except (PeerGone, TimeoutError):
        return None
    return hello if "update_id" in hello else None


def _refuse(channel: Channel, reason: str, *, elsewhere: bool = False) -> None:
    with suppress(PeerGone, TimeoutError):
        channel.send({"refused": reason, "elsewhere": elsewhere})
    channel.close()


def _given_up(manifest: WeightManifest, reason: str, message: dict[str, Any]) -> WeightSyncError:
    kind = CalledOffError if message.get("called_off") else WeightSyncError
    return _broken(manifest, f"the sender says: {reason}", kind)


def _broken(
    manifest: WeightManifest,
    why: str,
    kind: type[WeightSyncError] = WeightSyncError,
    *,
    hint: str | None = None,
) -> WeightSyncError:
    return kind(
        f"weight update {manifest.version} broke off: {why}",
        hint=hint or "send the update again",
    )
