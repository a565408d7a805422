"""What holds for every weight transport: what is sent arrives, in order and proven; what is torn is refused.

Both ends run at once, as under a runtime of several processes; a transport that declares `across_processes` is tried
with real ones as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces.transport import (
    AdapterSpec,
    WeightManifest,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail.interfaces.transport_checks import received_whole
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.transport_ends import (
    Contents,
    TransportEnd,
    TransportPlace,
    case_tensors,
    contents,
    manifest_of,
)

Outcome = Contents | WeightSyncError


class WeightTransportConformance(PluginConformance):
    """Subclass it, set `plugin` and a `config` that gives up after a second or so, and pytest runs the suite."""

    kind = "weight_transport"
    plugin: ClassVar[type[WeightTransport]]

    @pytest.fixture(autouse=True)
    def run_directory(self, tmp_path: Path) -> Path:
        """The run's directory of every end in a test."""
        self._run_directory = tmp_path
        return tmp_path

    def make(self, **context: Any) -> Any:
        """A transport of the test's run."""
        return super().make(**{"run_directory": self._run_directory, **context})

    # How the suite runs it

    @contextmanager
    def ends(self, receivers: int = 1) -> Iterator[tuple[WeightSender, list[WeightReceiver]]]:
        """A sender and receivers in this process."""
        transport = self.make()
        with ExitStack() as closing:
            made = []
            for _ in range(receivers):
                made.append(transport.receiver())
                closing.callback(made[-1].close)
            sender = transport.sender()
            closing.callback(sender.close)
            yield sender, made

    def exchange(
        self,
        sender: WeightSender,
        receivers: Sequence[WeightReceiver],
        manifest: WeightManifest,
        tensors: dict[str, Tensor],
    ) -> tuple[WeightSyncError | None, list[Outcome]]:
        """One update: the sender's error, and what each receiver got or its error."""

        def received(receiver: WeightReceiver) -> Outcome:
            try:
                return contents(receiver.receive(manifest))
            except WeightSyncError as error:
                return error

        with ThreadPoolExecutor(len(receivers) + 1) as threads:
            running = [threads.submit(received, receiver) for receiver in receivers]
            failed = None
            try:
                sender.send(manifest, tensors.items())
            except WeightSyncError as error:
                failed = error
            return failed, [future.result() for future in running]

    def place(self) -> TransportPlace:
        """For ends in processes of their own."""
        return TransportPlace(
            plugin=self.plugin, config=self.make_config(), run_directory=self._run_directory
        )

    def needs_processes(self) -> None:
        """Skip where the ends must be in one process."""
        if "across_processes" not in self.plugin.capabilities:
            pytest.skip("the transport does not declare across_processes")

    # What holds

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
        manifest = manifest_of(tensors, bucket_bytes=100)
        with self.ends() as (sender, (receiver,)), ThreadPoolExecutor(1) as thread:
            whole = thread.submit(received_whole, receiver, manifest)
            sender.send(manifest, tensors.items())
            kept = whole.result()
            assert contents(iter(kept)) == contents(iter(tensors.items()))

    def test_an_update_that_never_comes_is_an_error_that_names_it(self) -> None:
        with (
            self.ends() as (_, (receiver,)),
            pytest.raises(WeightSyncError, match="weight update 9 did not"),
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
        with self.ends() as (sender, receivers):
            failed, (arrived,) = self.exchange(sender, receivers, manifest, wrong)
            assert failed is not None
            assert named.get(fault, "'scalar'") in str(failed)
            assert isinstance(arrived, WeightSyncError)
            assert "weight update 4" in str(arrived)
            again, (arrived,) = self.exchange(
                sender, receivers, manifest_of(tensors, version=4), tensors
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

    def test_a_receiver_that_stops_halfway_stands_in_nobodys_way(self) -> None:
        tensors = case_tensors()
        with self.ends(receivers=2) as (sender, (lazy, diligent)):
            manifest = manifest_of(tensors, 1, bucket_bytes=100)
            with ThreadPoolExecutor(2) as threads:

                def stops() -> None:
                    arriving = lazy.receive(manifest)
                    next(iter(arriving))
                    getattr(arriving, "close", lambda: None)()

                stopped = threads.submit(stops)
                whole = threads.submit(lambda: contents(diligent.receive(manifest)))
                # Whether the sender hears of it is the transport's own affair.
                with suppress(WeightSyncError):
                    sender.send(manifest, tensors.items())
                stopped.result()
                assert whole.result() == contents(iter(tensors.items()))
            failed, arrived = self.exchange(
                sender, [lazy, diligent], manifest_of(tensors, 2, 100), tensors
            )
            assert failed is None
            assert arrived == [contents(iter(tensors.items()))] * 2

    # With real processes

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
                manifest = manifest_of(tensors, version, bucket_bytes)
                receiving = [end.receive(manifest) for end in (first, second)]
                sender.send(manifest, seed=version).answer()
                assert [end.answer() for end in receiving] == [contents(iter(tensors.items()))] * 2

    def test_what_a_killed_run_left_is_not_taken_for_an_update(self) -> None:
        """The receiver looks before the new run's sender is there."""
        self.needs_processes()
        place = self.place()
        with TransportEnd(place, "receiver") as old, TransportEnd(place, "sender") as killed:
            manifest = manifest_of(case_tensors(1), version=1)
            old.receive(manifest)
            killed.send(manifest, seed=1).answer()
            killed.kill()
            old.kill()
        manifest = manifest_of(case_tensors(2), version=1)
        with TransportEnd(place, "receiver") as receiver:
            receiver.receive(manifest)
            sender = self.make().sender()
            sender.send(manifest, case_tensors(2).items())
            assert receiver.answer() == contents(iter(case_tensors(2).items()))
            sender.close()

    def test_a_sender_that_is_killed_halfway_tears_only_its_own_update(self) -> None:
        self.needs_processes()
        receiver = self.make().receiver()
        manifest = manifest_of(case_tensors(1), version=1, bucket_bytes=64)
        with TransportEnd(self.place(), "sender") as killed, ThreadPoolExecutor(1) as thread:
            torn = thread.submit(lambda: contents(receiver.receive(manifest)))
            killed.send(manifest, seed=1, hang_before="transposed")
            with pytest.raises(TimeoutError):
                killed.answer(0.3)
            killed.kill()
            with pytest.raises(WeightSyncError, match="weight update 1"):
                torn.result()
        sender = self.make().sender()
        manifest = manifest_of(case_tensors(2), version=2)
        failed, (arrived,) = self.exchange(sender, [receiver], manifest, case_tensors(2))
        assert failed is None
        assert arrived == contents(iter(case_tensors(2).items()))
        receiver.close()
        sender.close()

    def test_a_receiver_that_is_killed_stands_in_nobodys_way(self) -> None:
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
