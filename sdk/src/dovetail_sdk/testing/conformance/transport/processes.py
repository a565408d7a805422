"""Tests of transports between real processes, of which some are killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from dovetail.errors import ReceiverError, WeightSyncError
from dovetail_sdk.testing.conformance.transport.ends import (
    IN_VAIN,
    PATIENCE,
    EndsOfATransport,
    outcome_of,
)
from dovetail_sdk.testing.transport_ends import TransportEnd, case_tensors, contents, manifest_of


class BetweenProcesses(EndsOfATransport):
    """Tests of transports with the capability `across_processes`."""

    def test_processes_receive_what_another_one_sends(self) -> None:
        self.needs_processes()
        place = self.place()
        with (
            TransportEnd(place, "receiver", 0) as first,
            TransportEnd(place, "receiver", 1) as second,
            TransportEnd(place, "sender") as sender,
        ):
            for version, bucket_bytes in ((1, 300), (2, 1 << 20), (3, 64)):
                tensors = case_tensors(seed=version)
                manifest = attrs.evolve(manifest_of(tensors, version, bucket_bytes), receivers=2)
                manifest = sender.prepare(manifest)
                receiving = [end.receive(manifest) for end in (first, second)]
                sender.send(manifest, seed=version).answer()
                assert [end.answer() for end in receiving] == [contents(iter(tensors.items()))] * 2

    def test_what_a_killed_run_left_is_not_taken_for_an_update(self) -> None:
        """The new run's receiver starts to receive before its sender has sent anything, and must not take the killed run's update."""
        self.needs_processes()
        place = self.place()
        with TransportEnd(place, "receiver") as old, TransportEnd(place, "sender") as killed:
            manifest = killed.prepare(
                attrs.evolve(manifest_of(case_tensors(1), version=1), receivers=1)
            )
            old.receive(manifest)
            killed.send(manifest, seed=1).answer()
            killed.kill()
            old.kill()
        with TransportEnd(place, "receiver") as receiver:
            sender = self.make().sender()
            manifest = self.prepared(sender, manifest_of(case_tensors(2), version=1), 1)
            receiver.receive(manifest)
            with pytest.raises(TimeoutError):
                receiver.answer(0.2)
            sender.send(manifest, self.placed(case_tensors(2)))
            assert receiver.answer() == contents(iter(case_tensors(2).items()))
            sender.close()

    def test_a_sender_that_is_killed_halfway_tears_only_its_own_update(self) -> None:
        self.needs_processes()
        # A receiver that notices the sender's end waits for it; another receiver waits until its time limit.
        receiver = self.make(timeout=PATIENCE if self.meets else IN_VAIN).receiver()
        manifest = manifest_of(case_tensors(1), version=1, bucket_bytes=64)
        with TransportEnd(self.place(), "sender") as killed, ThreadPoolExecutor(1) as thread:
            manifest = killed.prepare(attrs.evolve(manifest, receivers=1))
            torn = thread.submit(lambda: contents(receiver.receive(manifest)))
            killed.send(manifest, seed=1, hang_before="transposed")
            killed.await_hang()
            killed.kill()
            with pytest.raises(WeightSyncError, match="weight update 1"):
                torn.result()
        sender = self.make().sender()
        manifest = manifest_of(case_tensors(2), version=2)
        failed, (arrived,) = self.exchange(
            sender, [receiver], manifest, case_tensors(2), at_once=self.meets
        )
        assert failed is None
        assert arrived == contents(iter(case_tensors(2).items()))
        receiver.close()
        sender.close()

    def test_a_receiver_that_is_killed_halfway_is_named_and_the_next_update_arrives(self) -> None:
        """The next update goes to a new receiver of the same rank, as after a rollout's restart."""
        self.needs_processes()
        self.needs("ends_meet")
        tensors, place = case_tensors(), self.place()
        here, sender = self.make(rank=0, role="receiver").receiver(), self.make().sender()
        manifest = self.prepared(sender, manifest_of(tensors, 1, 64), 2)
        with TransportEnd(place, "receiver", 1) as killed, ThreadPoolExecutor(2) as threads:
            killed.receive(manifest, hang_after="norm.weight")
            arriving = threads.submit(outcome_of, here, manifest)
            sending = threads.submit(sender.send, manifest, self.placed(tensors))
            killed.await_hang()
            killed.kill()
            with pytest.raises(ReceiverError, match=r"receiver\.1 .*(ended|did not finish)"):
                sending.result()
            # A transport may deliver the update to the other receivers, or to none.
            arrived = arriving.result()
            assert isinstance(arrived, WeightSyncError) or arrived == contents(
                iter(tensors.items())
            )
        tensors = case_tensors(2)
        with TransportEnd(place, "receiver", 1) as successor, ThreadPoolExecutor(1) as thread:
            manifest = self.prepared(sender, manifest_of(tensors, 2, 64), 2)
            successor.receive(manifest)
            arriving = thread.submit(outcome_of, here, manifest)
            sender.send(manifest, self.placed(tensors))
            assert [arriving.result(), successor.answer()] == [contents(iter(tensors.items()))] * 2
        here.close()
        sender.close()

    def test_a_receiver_that_is_killed_does_not_block_the_others(self) -> None:
        self.needs_processes()
        tensors = case_tensors()
        receiver, sender = self.make().receiver(), self.make().sender()
        with TransportEnd(self.place(), "receiver") as killed:
            killed.kill()
            failed, (arrived,) = self.exchange(
                sender, [receiver], manifest_of(tensors, 1, 100), tensors
            )
        assert failed is None
        assert arrived == contents(iter(tensors.items()))
        receiver.close()
        sender.close()
