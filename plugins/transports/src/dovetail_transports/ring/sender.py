"""The trainer's end: fills slots, announces them, and refills a slot when every receiver is done with its bucket."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

import attrs
from torch import Tensor

from dovetail.errors import CalledOffError, ReceiverError, WeightSyncError
from dovetail.interfaces import PluginContext, WeightManifest, WeightSender
from dovetail_rollouts import gather_the_rest, matched
from dovetail_transports.config import RingConfig
from dovetail_transports.ring.layout import BucketLayout
from dovetail_transports.ring.peers import Peer, Peers
from dovetail_transports.ring.rendezvous import SenderRendezvous
from dovetail_transports.ring.slots import DeliveryError, SenderSlots
from dovetail_transports.ring.writer import BucketCopier, Written

_ARRIVAL_SECONDS = 0.002


_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 5.0
"""Seconds to wait, after a failed delivery, to find out which receiver failed."""


class RingSender(WeightSender):
    """Sends updates through a ring of buckets.

    The manifest gives the number of receivers, in all or on each machine. Without a number, an update starts as soon as a receiver has
    connected, and goes to the receivers that have connected by then.

    Args:
        rendezvous: the means by which the sender and its receivers connect.
        slots: the sender's end of the ring of slots, each of which holds one bucket.
    """

    def __init__(
        self,
        config: RingConfig,
        context: PluginContext,
        rendezvous: SenderRendezvous,
        slots: SenderSlots,
    ) -> None:
        self._config, self._context, self._rendezvous, self._slots = (
            config,
            context,
            rendezvous,
            slots,
        )
        self._writer = BucketCopier(verify=config.verify)

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        return self._rendezvous.prepare(manifest)

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send an update, in the manifest's shapes, and wait until every receiver has finished the last bucket.

        Raises:
            ReceiverError: too few receivers connected, and none has the update. Or a receiver refused the update or failed: the others
                have the complete update, unless the transport needs all receivers (`SenderSlots.collective`).
            WeightSyncError: the tensors differ from the manifest, or there is no memory for the ring.
        """
        gathered, context = iter(tensors), self._context
        first = context.rank == 0
        if manifest.receivers_on:
            here = manifest.receivers_on.get(context.machine or "", 0)
            first = context.machine_rank == 0 and here > 0
            manifest = attrs.evolve(manifest, receivers=here)
        if not first:
            gather_the_rest(matched(manifest, gathered))
            return
        source = _Source(matched(manifest, gathered))
        peers = Peers(manifest.version, self._config.timeout, collective=self._slots.collective)
        outcome = "every receiver has it"
        try:
            layout = BucketLayout.of(manifest)
            gather_receivers(
                self._rendezvous, peers, manifest, _hello(manifest, layout), self._config.timeout
            )
            self._send(manifest, layout, source, peers)
        except Exception as error:
            outcome = str(error)
            peers.broke_off(outcome, called_off=isinstance(error, CalledOffError))
            if not source.failed:
                gather_the_rest(gathered)
            raise
        finally:
            peers.close()
            self._rendezvous.finish(manifest, outcome)

    def close(self) -> None:
        self._slots.close()
        self._rendezvous.close()

    # -- one update ----------------------------------------------------------------------------

    def _send(
        self,
        manifest: WeightManifest,
        layout: BucketLayout,
        source: _Source,
        peers: Peers,
    ) -> None:
        peers.expect(len(layout.buckets))
        self._slots.fit(layout.slot_bytes)
        offers = self._slots.offers([peer.state for peer in peers])
        for peer, offer in zip(peers, offers, strict=True):
            peers.tell(peer, {"slots": offer.message}, offer.descriptor)
        # A thread announces the buckets, and waits for their copies while this thread gathers the next tensors.
        with ThreadPoolExecutor(1) as announcer:
            announced: list[Future[None]] = []
            try:
                self._slots.join(peers.check)
                try:
                    for written in self._filled(layout, source, peers):
                        announced.append(announcer.submit(self._announce, written, peers))
                        _raise_what_failed(announced)
                finally:
                    # Also if a tensor failed, since receivers take part in the delivery of the buckets before.
                    _await(announced, peers)
                peers.await_done(len(layout.buckets))
            except DeliveryError:
                self._slots.abort()
                peers.blame(_LAST_WORDS_SECONDS)
                raise
            except BaseException as error:
                # If only a tensor failed, all announced buckets are delivered, and the ring can be kept.
                if not source.failed or isinstance(error, ReceiverError):
                    self._slots.abort()
                raise
        self._slots.settle()
        faults = peers.faults()
        if faults:
            whole = sum(peer.fault is None for peer in peers)
            raise ReceiverError(
                f"weight update {manifest.version} reached {whole} of {len(peers)} receivers: {faults}",
                hint="send the update again, to all receivers",
            )

    def _filled(
        self, layout: BucketLayout, source: Iterator[tuple[str, Tensor]], peers: Peers
    ) -> Iterator[Written]:
        """Yield each bucket of the update, with the copies of its tensors into its slot queued.

        At most as many buckets as the ring has slots are ahead of the slowest receiver.

        Args:
            layout: the layout of the buckets.
            source: the tensors in the manifest's order, each gathered when it is requested.
            peers: the receivers.
        """
        for number, places in enumerate(layout.buckets):
            if number >= self._slots.slots:
                peers.await_done(number - self._slots.slots + 1)
            bucket = self._writer.start(self._slots, number)
            for place in places:
                _, tensor = next(source)
                bucket.put(place, tensor)
            if number == len(layout.buckets) - 1:
                # Surplus tensors must raise an error before the last bucket completes the update.
                gather_the_rest(source)
            yield bucket.finish()
        if not layout.buckets:
            gather_the_rest(source)

    def _announce(self, written: Written, peers: Peers) -> None:
        digests = [f"{digest:016x}" for digest in written.wait()]
        peers.tell_all({"bucket": written.number, "digests": digests})
        self._slots.deliver(written.number, written.nbytes)


def _raise_what_failed(announced: list[Future[None]]) -> None:
    while announced and announced[0].done():
        announced.pop(0).result()


def _await(announced: list[Future[None]], peers: Peers) -> None:
    """Wait until all filled buckets are announced and delivered."""
    while announced:
        with suppress(FutureTimeoutError):
            announced[0].exception(_POLL_SECONDS)
        _raise_what_failed(announced)
        peers.check()


def _hello(manifest: WeightManifest, layout: BucketLayout) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "update_id": manifest.update_id,
        "fingerprint": layout.fingerprint,
    }


class _Source(Iterator[tuple[str, Tensor]]):
    """The tensors of an update, in order. `failed` is set if gathering a tensor raised an error, in contrast to sending it."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self.failed = False

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._tensors)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise


def gather_receivers(
    rendezvous: SenderRendezvous,
    peers: Peers,
    manifest: WeightManifest,
    hello: dict[str, Any],
    timeout: float,
) -> None:
    """Add the receivers that connect to `peers` and send `hello` to each, until as many have answered as the manifest says.

    If the manifest has no number of receivers, return as soon as one has connected.

    Args:
        rendezvous: the means by which the receivers connect.
        peers: the receivers, none at first.
        manifest: the manifest of the update.
        hello: the first message to each receiver, which identifies the update.
        timeout: seconds to wait in all.

    Raises:
        CalledOffError: a receiver has called the update off.
        ReceiverError: too few receivers connected in time; the error names those that did.
        WeightSyncError: the manifest has no number of receivers, and the rendezvous needs it (`SenderRendezvous.counted`).
    """
    if manifest.receivers is None and rendezvous.counted:
        raise WeightSyncError(
            f"the manifest of weight update {manifest.version} lacks the number of receivers",
            hint="set the manifest's `receivers`",
        )
    rendezvous.begin(manifest)
    deadline = time.monotonic() + timeout
    while True:
        for peer in rendezvous.arrivals(timeout):
            peers.add(peer)
            peers.tell(peer, hello)
        if manifest.receivers is None:
            if len(peers):
                return
        else:
            peers.listen()
            answered = [peer for peer in peers if _answered(peer)]
            if len(answered) >= manifest.receivers:
                peers.keep(answered)
                return
        reason = rendezvous.called_off(manifest)
        if reason is not None:
            raise CalledOffError(
                f"weight update {manifest.version} was called off before it began: {reason}",
                hint="no receiver has any part of it; send it again once the rollout runs",
            )
        if time.monotonic() > deadline:
            raise _too_few(rendezvous, peers, manifest, timeout)
        time.sleep(_ARRIVAL_SECONDS)


def _answered(peer: Peer) -> bool:
    """Return whether a receiver takes or refuses this update; a receiver that has ended does not count."""
    return peer.refused or (peer.ready and peer.fault is None)


def _too_few(
    rendezvous: SenderRendezvous, peers: Peers, manifest: WeightManifest, timeout: float
) -> ReceiverError:
    if not len(peers):
        message = f"can't be sent: no receiver registered at {rendezvous.place} within {timeout:g} seconds"
    else:
        message = (
            f"can't be sent: {sum(_answered(p) for p in peers)} of {manifest.receivers} receivers answered at "
            f"{rendezvous.place} within {timeout:g} seconds: {'; '.join(_in_words(peer) for peer in peers)}"
        )
    return ReceiverError(f"weight update {manifest.version} {message}", hint=rendezvous.hint)


def _in_words(peer: Peer) -> str:
    return f"{peer.who} {peer.fault or ('is ready' if peer.ready else 'is registered but does not receive')}"
