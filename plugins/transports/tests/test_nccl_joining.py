"""A receiver that dies while the group of its update is being made: the sender's error names it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest

from dovetail.errors import ReceiverError
from dovetail_sdk.testing.conformance.transport.ends import outcome_of
from dovetail_sdk.testing.transport_ends import (
    TransportEnd,
    TransportPlace,
    case_tensors,
    contents,
    manifest_of,
)
from dovetail_transports.config import NcclConfig
from dovetail_transports.nccl.broadcast_slots import BroadcastSenderSlots
from dovetail_transports.nccl.transport import NcclTransport
from dovetail_transports.ring.slots import Pulse


@pytest.mark.parametrize(
    # The group notices the loss only after its time limit, within which the next update must arrive too.
    ("noticed", "timeout"),
    [("by its closed end", 60.0), ("by the group alone", 5.0)],
)
def test_a_receiver_that_dies_before_it_joins_is_named_and_the_next_update_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: str, timeout: float
) -> None:
    config = NcclConfig(name="nccl", timeout=timeout)
    place = TransportPlace(plugin=NcclTransport, config=config, run_directory=tmp_path)
    sender = place.transport("sender").sender()
    join = BroadcastSenderSlots.join
    tensors = case_tensors()
    manifest = sender.prepare(attrs.evolve(manifest_of(tensors), receivers=1))

    with TransportEnd(place, "receiver") as killed:

        def join_without(slots: BroadcastSenderSlots, pulse: Pulse) -> None:
            killed.kill()
            join(slots, pulse if noticed == "by its closed end" else lambda: None)

        monkeypatch.setattr(BroadcastSenderSlots, "join", join_without)
        killed.receive(manifest)
        with pytest.raises(ReceiverError, match=r"receiver\.0 .* ended"):
            sender.send(manifest, iter(tensors.items()))
    monkeypatch.setattr(BroadcastSenderSlots, "join", join)

    manifest = attrs.evolve(manifest, version=2, update_id="again")
    receiver = place.transport("receiver").receiver()
    with ThreadPoolExecutor(1) as thread:
        arriving = thread.submit(outcome_of, receiver, manifest)
        sender.send(manifest, iter(tensors.items()))
        assert arriving.result() == contents(iter(tensors.items()))
    receiver.close()
    sender.close()
