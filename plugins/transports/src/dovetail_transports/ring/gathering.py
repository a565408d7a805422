"""Gathering: the receivers of an update come to its sender, as many as it waits for."""

from __future__ import annotations

import time
from typing import Any

from dovetail.errors import CalledOffError, ReceiverError, WeightSyncError
from dovetail.interfaces import WeightManifest
from dovetail_transports.ring.peers import Peer, Peers
from dovetail_transports.ring.rendezvous import SenderRendezvous

_POLL_SECONDS = 0.002


def gather_receivers(
    rendezvous: SenderRendezvous,
    peers: Peers,
    manifest: WeightManifest,
    hello: dict[str, Any],
    timeout: float,
) -> None:
    """Greet receivers as they connect, until there are as many as the manifest says; without a number, those that have connected so far.

    Raises:
        CalledOffError: a receiver will not connect.
        ReceiverError: too few connected in time; names them.
        WeightSyncError: the number of receivers is unknown.
    """
    if manifest.receivers is None and rendezvous.counted:
        raise WeightSyncError(
            f"the manifest of weight update {manifest.version} does not say how many receivers take it",
            hint="set its `receivers`",
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
                hint="no receiver has any of it; send the update again when the rollout is there",
            )
        if time.monotonic() > deadline:
            raise _too_few(rendezvous, peers, manifest, timeout)
        time.sleep(_POLL_SECONDS)


def _answered(peer: Peer) -> bool:
    """It came for this very update, whether it takes or refuses it; those that have ended do not count."""
    return peer.refused or (peer.ready and peer.fault is None)


def _too_few(
    rendezvous: SenderRendezvous, peers: Peers, manifest: WeightManifest, timeout: float
) -> ReceiverError:
    if not len(peers):
        message = f"can't be sent: no receiver registered at {rendezvous.place} within {timeout:g} seconds"
    else:
        message = (
            f"waits for {manifest.receivers} receivers, of which {sum(_answered(p) for p in peers)} came to "
            f"{rendezvous.place} within {timeout:g} seconds: {'; '.join(_in_words(peer) for peer in peers)}"
        )
    return ReceiverError(f"weight update {manifest.version} {message}", hint=rendezvous.hint)


def _in_words(peer: Peer) -> str:
    return f"{peer.who} {peer.fault or ('is there' if peer.ready else 'is registered but does not receive')}"
