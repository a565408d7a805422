"""Tests of transports whose sender waits for as many receivers as the manifest says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dovetail.errors import ReceiverError, WeightSyncError
from dovetail_sdk.testing.conformance.transport.ends import TO_COME, EndsOfATransport, outcome_of
from dovetail_sdk.testing.transport_ends import case_tensors, contents, manifest_of


class EndsThatMeet(EndsOfATransport):
    """Tests of transports with the capability `ends_meet`: the sender waits until every receiver has taken the update."""

    def test_an_update_waits_for_all_the_receivers_that_it_counts(self) -> None:
        self.needs("ends_meet")
        tensors = case_tensors()
        with self.ends() as (sender, (first,)), ThreadPoolExecutor(3) as threads:
            manifest = self.prepared(sender, manifest_of(tensors, bucket_bytes=100), 2)
            sending = threads.submit(sender.send, manifest, self.placed(tensors))
            arriving = [threads.submit(outcome_of, first, manifest)]
            with pytest.raises(TimeoutError):
                sending.result(0.3)
            late = self.make().receiver()
            arriving.append(threads.submit(outcome_of, late, manifest))
            sending.result()
            expected = contents(iter(tensors.items()))
            assert [arrived.result() for arrived in arriving] == [expected] * 2
            late.close()

    def test_too_few_receivers_are_counted_in_the_error(self) -> None:
        self.needs("ends_meet")
        with (
            self.ends(timeout=TO_COME) as (sender, (receiver,)),
            ThreadPoolExecutor(1) as thread,
        ):
            manifest = self.prepared(sender, manifest_of(case_tensors()), 2)
            arriving = thread.submit(outcome_of, receiver, manifest)
            with pytest.raises(ReceiverError, match="1 of 2 receivers answered"):
                sender.send(manifest, self.placed(case_tensors()))
            assert isinstance(arriving.result(), WeightSyncError)
