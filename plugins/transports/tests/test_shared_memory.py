"""Shared memory: limited to its ring, private, freed with its processes; and faults that name the side that failed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch

from dovetail.errors import ConfigError, WeightSyncError
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing.transport_ends import (
    TransportEnd,
    TransportPlace,
    case_tensors,
    contents,
    manifest_of,
)
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.ring.writer import BucketWriter
from dovetail_transports.shared_memory.transport import SharedMemoryTransport

ROWS = {f"row {i:02d}": torch.full((16,), float(i)) for i in range(20)}
"""Tensors of 64 bytes each."""


def held(root: Path) -> list[Path]:
    """All files below a rendezvous root."""
    return sorted(root.rglob("*"))


def test_the_sender_is_never_more_than_the_ring_ahead(transport) -> None:
    sender, receiver = transport(buckets=3).sender(), transport().receiver()
    gathered = []

    def gathering():
        for name, tensor in ROWS.items():
            gathered.append(name)
            yield name, tensor

    manifest = manifest_of(ROWS, bucket_bytes=128)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, gathering())
        for number, (name, tensor) in enumerate(receiver.receive(manifest)):
            if number == 3:
                time.sleep(0.3)  # the sender fills as many slots as it may
            # A bucket has two rows; at most the bucket that is read and two further buckets are gathered.
            assert len(gathered) <= 2 * (number // 2 + 3)
            assert (name, tensor.tolist()) == (f"row {number:02d}", [float(number)] * 16)
        sending.result()
    assert len(gathered) == 20


def test_tensors_are_views_of_one_ring_that_is_kept(transport) -> None:
    sender, receiver = transport().sender(), transport().receiver()
    assert receiver.lasting is False
    addresses = []
    with ThreadPoolExecutor(1) as thread:
        for version in (1, 2):
            manifest = manifest_of(ROWS, version, bucket_bytes=128)
            sending = thread.submit(sender.send, manifest, ROWS.items())
            addresses.append([tensor.data_ptr() for _, tensor in receiver.receive(manifest)])
            sending.result()
    assert addresses[0] == addresses[1]
    assert len(set(addresses[0])) == 4


def test_a_larger_update_gets_a_larger_ring(transport) -> None:
    sender, receiver = transport().sender(), transport().receiver()
    with ThreadPoolExecutor(1) as thread:
        for version, size in ((1, 10), (2, 100_000), (3, 10)):
            tensors = {"w": torch.arange(size) + version}
            manifest = manifest_of(tensors, version, bucket_bytes=64)
            sending = thread.submit(sender.send, manifest, tensors.items())
            assert contents(receiver.receive(manifest)) == contents(iter(tensors.items()))
            sending.result()


def test_without_digests_tensors_arrive_all_the_same(transport) -> None:
    sender, receiver = transport(verify=False).sender(), transport(verify=False).receiver()
    manifest = manifest_of(ROWS, bucket_bytes=128)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, ROWS.items())
        assert contents(receiver.receive(manifest)) == contents(iter(ROWS.items()))
        sending.result()


# Files and memory during an update and afterwards


def test_what_has_a_name_is_private_and_goes_with_the_last_end(transport, meetings: Path) -> None:
    sender, receiver = transport().sender(), transport().receiver()
    manifest = manifest_of(ROWS)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, ROWS.items())
        list(receiver.receive(manifest))
        sending.result()
    directory, *files = held(meetings)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
    assert sum(file.stat().st_size for file in files) == 0
    sender.close()
    assert directory in held(meetings)
    receiver.close()
    receiver.close()
    assert held(meetings) == []


def processes(meetings: Path) -> TransportPlace:
    return TransportPlace(
        plugin=SharedMemoryTransport,
        config=SharedMemoryConfig(
            name="shared_memory", directory=str(meetings), channel="test", timeout=60.0
        ),
        run_directory=meetings,
    )


def test_what_a_killed_sender_leaves_goes_with_the_receiver(transport, meetings: Path) -> None:
    receiver = transport().receiver()
    manifest = manifest_of(case_tensors(), bucket_bytes=64)
    with TransportEnd(processes(meetings), "sender") as sender:
        receiving = receiver.receive(manifest)
        sender.send(manifest, seed=0, hang_before="head.weight")
        next(receiving)
        sender.kill()
    with pytest.raises(WeightSyncError, match="sender ended"):
        list(receiving)
    receiver.close()
    assert held(meetings) == []


def test_what_killed_runs_leave_goes_when_the_next_one_comes(transport, meetings: Path) -> None:
    with TransportEnd(processes(meetings), "receiver") as killed:
        killed.kill()
    (directory,) = (path for path in meetings.iterdir() if path.is_dir())
    config = attrs.evolve(transport().config, channel="another run")
    receiver = SharedMemoryTransport(config, PluginContext()).receiver()
    assert not directory.exists()
    receiver.close()
    assert held(meetings) == []


def test_a_directory_that_others_may_enter_is_refused(transport, meetings: Path) -> None:
    meetings.chmod(0o755)
    with pytest.raises(WeightSyncError, match=r"only user .* mode 755"):
        transport().receiver()


def test_a_directory_that_is_too_long_for_sockets_is_refused(transport, meetings: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        SharedMemoryTransport(
            attrs.evolve(transport().config, directory=str(meetings / ("x" * 60))), PluginContext()
        ).receiver()


def test_outside_a_run_a_channel_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.weight_transport\.channel"):
        SharedMemoryTransport(SharedMemoryConfig(name="shared_memory"), PluginContext())


# Faults


def test_nobody_registered(transport) -> None:
    with pytest.raises(WeightSyncError, match=r"no receiver .* 0\.1 seconds"):
        transport(timeout=0.1).sender().send(manifest_of(ROWS), ROWS.items())


def test_a_receiver_that_does_not_come_is_named_and_the_other_has_the_update(transport) -> None:
    here, absent = transport(rank=0).receiver(), transport(rank=1).receiver()
    sender = transport(timeout=2.0).sender()  # long enough for the receiver that connects
    manifest = manifest_of(ROWS, bucket_bytes=128)
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(lambda: contents(here.receive(manifest)))
        with pytest.raises(
            WeightSyncError, match=r"reached 1 of 2 .* rollout\.1 .* did not finish"
        ):
            sender.send(manifest, ROWS.items())
        assert received.result() == contents(iter(ROWS.items()))
    # The connection to the absent receiver is not used for the next update.
    manifest = manifest_of(ROWS, version=2)
    with ThreadPoolExecutor(2) as threads:
        received_by = [
            threads.submit(lambda end=end: contents(end.receive(manifest)))
            for end in (here, absent)
        ]
        transport().sender().send(manifest, ROWS.items())
        assert [received.result() for received in received_by] == [contents(iter(ROWS.items()))] * 2


def test_the_receiver_hears_why_the_sender_broke_off(transport) -> None:
    sender, receiver = transport().sender(), transport().receiver()
    manifest = manifest_of(ROWS, bucket_bytes=128)

    def breaking():
        yield from list(ROWS.items())[:9]
        raise RuntimeError("out of memory")

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, breaking())
        with pytest.raises(WeightSyncError, match=r"sender .*: out of memory"):
            list(receiver.receive(manifest))
        with pytest.raises(RuntimeError, match="out of memory"):
            sending.result()


def test_bytes_that_change_under_way_are_found_and_the_sender_hears_of_it(
    transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = BucketWriter.put

    def damaging(self, place, tensor) -> None:
        put(self, place, tensor)
        if place.spec.name == "row 11":
            place.view(self._slot)[3] += 1e-6

    monkeypatch.setattr(BucketWriter, "put", damaging)
    sender, receiver = transport().sender(), transport().receiver()
    manifest = manifest_of(ROWS, bucket_bytes=128)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, ROWS.items())
        with pytest.raises(WeightSyncError, match="'row 11' of weight update 1"):
            list(receiver.receive(manifest))
        with pytest.raises(WeightSyncError, match=r"refused .*'row 11'"):
            sending.result()


def test_ends_with_different_manifests_are_told_so(transport) -> None:
    sender, receiver = transport().sender(), transport().receiver()
    manifest = manifest_of(ROWS)
    other = attrs.evolve(manifest, bucket_bytes=128)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, manifest, ROWS.items())
        with pytest.raises(WeightSyncError, match=r"manifests .* 1 differ"):
            list(receiver.receive(other))
        with pytest.raises(WeightSyncError, match=r"manifests .* 1 differ"):
            sending.result()


def test_a_sender_that_fails_gathers_the_rest_so_that_no_rank_waits_for_it(transport) -> None:
    """Two ranks gather through a barrier; rank 0 has no receiver."""
    barrier = threading.Barrier(2, timeout=60)

    def gathering():
        for item in ROWS.items():
            barrier.wait()
            yield item

    manifest = manifest_of(ROWS)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(transport(rank=1, timeout=0.1).sender().send, manifest, gathering())
        with pytest.raises(WeightSyncError, match="no receiver registered"):
            transport(timeout=0.1).sender().send(manifest, gathering())
        other.result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_tensors_of_an_accelerator_arrive(transport) -> None:
    device = torch.accelerator.current_accelerator()
    sender, receiver = transport().sender(), transport().receiver()
    tensors = case_tensors() | {"large": torch.randn(3, 1 << 20)}
    for version, bucket_bytes in ((1, 200), (2, 1 << 24)):
        manifest = manifest_of(tensors, version, bucket_bytes)
        there = [(name, tensor.to(device)) for name, tensor in tensors.items()]
        with ThreadPoolExecutor(1) as thread:
            # Each tensor is made just before it is sent, and its memory is free again right afterwards.
            sending = thread.submit(sender.send, manifest, ((n, t.clone()) for n, t in there))
            arrived = contents(receiver.receive(manifest))
            sending.result()
        assert arrived == contents(iter(tensors.items()))
    sender.close()
    receiver.close()
