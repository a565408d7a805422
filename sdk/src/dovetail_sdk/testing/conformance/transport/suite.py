"""The suite of weight transports: an update arrives complete and in order, or is refused.

Both ends run at the same time, as in a runtime with several processes; a transport that declares `across_processes` is also
tested with real processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import attrs
import pytest
import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import AdapterSpec
from dovetail_rollouts import received_whole
from dovetail_sdk.testing.conformance.transport.ends import IN_VAIN, PATIENCE
from dovetail_sdk.testing.conformance.transport.processes import BetweenProcesses
from dovetail_sdk.testing.conformance.transport.rendezvous import EndsThatMeet
from dovetail_sdk.testing.transport_ends import case_tensors, contents, manifest_of


class WeightTransportConformance(BetweenProcesses, EndsThatMeet):
    """Conformance suite for weight transports: subclass it and set `plugin`, and `config` if the default config is not enough.

    The suite sets the config's `timeout`: how many seconds sender and receivers wait for each other. A transport without a `timeout`
    should stop waiting after about ten seconds.
    """

    @pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
    def test_an_update_arrives_whole_and_in_order(self, bucket_bytes: int) -> None:
        tensors = case_tensors()
        with self.ends() as (sender, receivers):
            failed, (arrived,) = self.exchange(
                sender, receivers, manifest_of(tensors, bucket_bytes=bucket_bytes), tensors
            )
        assert failed is None
        assert arrived == contents(iter(tensors.items()))

    def test_several_updates_reach_several_receivers(self) -> None:
        with self.ends(receivers=3) as (sender, receivers):
            for version, bucket_bytes in ((1, 256), (2, 1 << 20), (3, 100)):
                tensors = case_tensors(seed=version)
                failed, arrived = self.exchange(
                    sender, receivers, manifest_of(tensors, version, bucket_bytes), tensors
                )
                assert failed is None
                assert arrived == [contents(iter(tensors.items()))] * 3

    def test_an_adapter_arrives_as_any_other_update(self) -> None:
        tensors = case_tensors()
        spec = AdapterSpec(rank=2, alpha=4.0, target_modules=("q_proj",))
        manifest = attrs.evolve(manifest_of(tensors), kind="adapter", adapter=spec)
        with self.ends() as (sender, receivers):
            failed, (arrived,) = self.exchange(sender, receivers, manifest, tensors)
        assert failed is None
        assert arrived == contents(iter(tensors.items()))

    def test_an_update_without_tensors_arrives(self) -> None:
        with self.ends() as (sender, receivers):
            failed, (arrived,) = self.exchange(sender, receivers, manifest_of({}), {})
        assert failed is None
        assert arrived == []

    def test_an_update_can_be_kept_whole(self) -> None:
        tensors = case_tensors()
        with self.ends() as (sender, (receiver,)), ThreadPoolExecutor(1) as thread:
            manifest = self.prepared(sender, manifest_of(tensors, bucket_bytes=100), 1)
            whole = thread.submit(received_whole, receiver, manifest)
            sender.send(manifest, self.placed(tensors))
            kept = whole.result()
            assert contents(iter(kept)) == contents(iter(tensors.items()))

    def test_an_update_that_never_comes_is_an_error_that_names_it(self) -> None:
        with (
            self.ends(timeout=IN_VAIN) as (_, (receiver,)),
            pytest.raises(WeightSyncError, match="weight update 9"),
        ):
            list(receiver.receive(manifest_of(case_tensors(), version=9)))

    @pytest.mark.parametrize("fault", ["renamed", "reshaped", "retyped", "missing", "extra"])
    def test_what_does_not_fit_the_manifest_is_refused_and_the_next_update_arrives(
        self, fault: str
    ) -> None:
        tensors = case_tensors()
        manifest = manifest_of(tensors, version=4, bucket_bytes=256)
        wrong = {
            "renamed": {("other" if n == "scalar" else n): v for n, v in tensors.items()},
            "reshaped": tensors | {"scalar": torch.zeros(2)},
            "retyped": tensors | {"scalar": torch.tensor(1.0).double()},
            "missing": {n: v for n, v in tensors.items() if n != "head.weight"},
            "extra": tensors | {"more": torch.zeros(1)},
        }[fault]
        named = {"renamed": "'other'", "missing": "'head.weight'", "extra": "'more'"}
        # Receivers that are not notified of the failure wait until their time limit.
        at_once = self.meets
        with self.ends(timeout=PATIENCE if at_once else IN_VAIN) as (sender, receivers):
            failed, (arrived,) = self.exchange(sender, receivers, manifest, wrong, at_once=at_once)
            assert failed is not None
            assert named.get(fault, "'scalar'") in str(failed)
            assert isinstance(arrived, WeightSyncError)
            assert "weight update 4" in str(arrived)
            again, (arrived,) = self.exchange(
                sender, receivers, manifest_of(tensors, version=4), tensors, at_once=at_once
            )
            assert again is None
            assert arrived == contents(iter(tensors.items()))

    def test_only_rank_zero_sends_while_every_rank_gathers(self) -> None:
        tensors = case_tensors()
        gathered: list[str] = []

        def gathering() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors.items():
                gathered.append(name)
                yield name, tensor

        sender = self.make(rank=1).sender()
        sender.send(manifest_of(tensors), gathering())
        sender.close()
        assert gathered == list(tensors)

    def test_a_receiver_that_stops_halfway_does_not_block_the_others(self) -> None:
        tensors = case_tensors()
        with self.ends(receivers=2) as (sender, (lazy, diligent)):
            manifest = self.prepared(sender, manifest_of(tensors, 1, bucket_bytes=100), 2)
            with ThreadPoolExecutor(2) as threads:

                def stops() -> None:
                    arriving = lazy.receive(manifest)
                    next(iter(arriving))
                    getattr(arriving, "close", lambda: None)()

                stopped = threads.submit(stops)
                whole = threads.submit(lambda: contents(diligent.receive(manifest)))
                # A transport may or may not report the stopped receiver to the sender.
                with suppress(WeightSyncError):
                    sender.send(manifest, self.placed(tensors))
                stopped.result()
                assert whole.result() == contents(iter(tensors.items()))
            failed, arrived = self.exchange(
                sender, [lazy, diligent], manifest_of(tensors, 2, 100), tensors
            )
            assert failed is None
            assert arrived == [contents(iter(tensors.items()))] * 2
