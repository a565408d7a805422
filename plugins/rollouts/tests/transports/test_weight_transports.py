"""Transports: tensors arrive in order and verified; incomplete or damaged updates are refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch

from dovetail.errors import ConfigError, WeightSyncError
from dovetail.interfaces import PluginContext, TensorSpec, WeightManifest
from dovetail_rollouts.transports.config import DiskTransportConfig, InProcessTransportConfig
from dovetail_rollouts.transports.disk import DiskTransport
from dovetail_rollouts.transports.in_process import InProcessTransport

TENSORS = {
    "embed.weight": torch.randn(7, 5),
    "norm.weight": torch.randn(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "odd": torch.randn(3, dtype=torch.float16),
}


def manifest_of(tensors, version=1, bucket_bytes=64) -> WeightManifest:
    specs = tuple(
        TensorSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for n, t in tensors.items()
    )
    return WeightManifest(
        version=version, tensors=specs, bucket_bytes=bucket_bytes, update_id=f"update {version}"
    )


IN_VAIN = 0.2
"""Seconds to wait for an update that never arrives; tests of updates that arrive have no such limit."""


@pytest.fixture(params=["in_process", "disk"])
def make(request, tmp_path: Path):
    """A function that makes a transport with the given settings."""
    if request.param == "in_process":
        return lambda **config: InProcessTransport(
            InProcessTransportConfig(**config), PluginContext()
        )
    return lambda **config: DiskTransport(
        DiskTransportConfig(**config), PluginContext(run_directory=tmp_path)
    )


@pytest.fixture
def transport(make):
    return make()


def test_receiving_may_begin_first(transport) -> None:
    manifest = manifest_of(TENSORS)
    sender, receiver = transport.sender(), transport.receiver()
    timer = threading.Timer(0.1, sender.send, (manifest, list(TENSORS.items())))
    timer.start()
    assert len(list(receiver.receive(manifest))) == len(TENSORS)
    timer.join()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {("other" if n == "scalar" else n): v for n, v in t.items()},
            "'other' where 'scalar'",
        ),
        (lambda t: t | {"scalar": torch.zeros(2)}, r"'scalar' with shape \(2,\)"),
        (lambda t: t | {"scalar": torch.tensor(1.0).double()}, "'scalar' as float64"),
        (lambda t: {n: v for n, v in t.items() if n != "odd"}, "off before tensor 'odd'"),
        (lambda t: t | {"more": torch.zeros(1)}, "'more', which"),
    ],
)
def test_what_does_not_fit_the_manifest_is_refused_by_the_sender(make, change, message) -> None:
    transport = make(timeout=IN_VAIN)
    with pytest.raises(WeightSyncError, match=message):
        transport.sender().send(manifest_of(TENSORS, version=4), change(dict(TENSORS)).items())
    with pytest.raises(WeightSyncError, match="4"):
        list(transport.receiver().receive(manifest_of(TENSORS, version=4)))


def test_in_process_a_receiver_hears_at_once_that_an_update_broke_off_and_the_next_one_comes() -> (
    None
):
    transport = InProcessTransport(InProcessTransportConfig(timeout=3600.0), PluginContext())
    sender, receiver = transport.sender(), transport.receiver()
    torn = manifest_of(TENSORS, version=4)
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(lambda: list(receiver.receive(torn)))
        with pytest.raises(WeightSyncError, match="broke off before"):
            sender.send(torn, list(TENSORS.items())[:2])
        with pytest.raises(WeightSyncError, match=r"weight update 4 broke.*says:"):
            receiving.result()
        again = attrs.evolve(torn, update_id="again")
        receiving = thread.submit(lambda: list(receiver.receive(again)))
        sender.send(again, TENSORS.items())
        assert len(receiving.result()) == len(TENSORS)


def test_in_process_finds_weights_that_changed_under_way() -> None:
    transport = InProcessTransport(InProcessTransportConfig(), PluginContext())
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    sender, receiver = transport.sender(), transport.receiver()
    sender.send(manifest_of(tensors, 2), tensors.items())
    tensors["b"][1] += 1e-6
    with pytest.raises(WeightSyncError, match="tensor 'b' of weight update 2 did not arrive"):
        list(receiver.receive(manifest_of(tensors, 2)))


def test_in_process_is_without_a_copy_and_lets_go_when_all_have_received() -> None:
    transport = InProcessTransport(InProcessTransportConfig(timeout=0.05), PluginContext())
    tensors = {"a": torch.ones(3)}
    sender, receivers = transport.sender(), [transport.receiver() for _ in range(2)]
    sender.send(manifest_of(tensors), tensors.items())
    for receiver in receivers:
        ((_, arrived),) = receiver.receive(manifest_of(tensors))
        assert arrived.data_ptr() == tensors["a"].data_ptr()
    with pytest.raises(WeightSyncError, match="did not arrive"):
        list(receivers[0].receive(manifest_of(tensors)))


def test_in_process_channels_are_shared_by_name_and_apart_otherwise() -> None:
    tensors = {"a": torch.ones(3)}
    make = lambda channel: InProcessTransport(  # noqa: E731
        InProcessTransportConfig(channel=channel, timeout=0.05), PluginContext()
    )
    make("here").sender().send(manifest_of(tensors), tensors.items())
    assert len(list(make("here").receiver().receive(manifest_of(tensors)))) == 1
    for elsewhere in ("there", None):
        with pytest.raises(WeightSyncError):
            list(make(elsewhere).receiver().receive(manifest_of(tensors)))


def disk(tmp_path: Path, rank: int = 0, **config) -> DiskTransport:
    return DiskTransport(
        DiskTransportConfig(directory=str(tmp_path / "w"), timeout=0.1, **config),
        PluginContext(rank=rank),
    )


@pytest.mark.parametrize("damage", ["flip", "cut", "no_index"])
def test_disk_finds_damaged_files(tmp_path: Path, damage: str) -> None:
    transport = disk(tmp_path)
    manifest = manifest_of(TENSORS, bucket_bytes=1 << 20)
    transport.sender().send(manifest, TENSORS.items())
    update = transport.directory / "version_00000001"
    file = update / "bucket_00000.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-4])
    else:
        (update / "manifest.json").unlink()
    with pytest.raises(WeightSyncError, match="weight update 1"):
        list(transport.receiver().receive(manifest))


def test_disk_shows_an_update_only_when_it_is_whole(tmp_path: Path) -> None:
    transport = disk(tmp_path)
    sender = transport.sender()

    def tensors():
        yield "embed.weight", TENSORS["embed.weight"]
        assert not (transport.directory / "version_00000001").exists()
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="died"):
        sender.send(manifest_of(TENSORS, bucket_bytes=1), tensors())
    assert list(transport.directory.iterdir()) == []


def test_disk_keeps_few_updates_and_starts_afresh(tmp_path: Path) -> None:
    transport = disk(tmp_path, keep=2)
    sender = transport.sender()
    for version in (1, 2, 3, 3):
        sender.send(manifest_of(TENSORS, version), TENSORS.items())
    names = sorted(p.name for p in transport.directory.iterdir())
    assert names == ["version_00000002", "version_00000003"]
    (transport.directory / "mine.txt").write_text("not an update")
    transport.sender()
    assert [p.name for p in transport.directory.iterdir()] == ["mine.txt"]


def test_disk_writes_from_rank_zero_while_every_rank_gathers(tmp_path: Path) -> None:
    gathered = []

    def tensors():
        for name, tensor in TENSORS.items():
            gathered.append(name)
            yield name, tensor

    disk(tmp_path, rank=1).sender().send(manifest_of(TENSORS), tensors())
    assert gathered == list(TENSORS)
    assert not (tmp_path / "w").exists()


def test_disk_writes_tied_tensors(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    tensors = {"embed": weight, "head": weight}
    transport = disk(tmp_path)
    transport.sender().send(manifest_of(tensors), tensors.items())
    arrived = dict(transport.receiver().receive(manifest_of(tensors)))
    assert torch.equal(arrived["head"], weight)


def test_disk_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.weight_transport\.directory"):
        DiskTransport(DiskTransportConfig(), PluginContext())


def test_disk_says_when_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a file in the way")
    with pytest.raises(WeightSyncError, match="can't be written"):
        disk(tmp_path).sender().send(manifest_of(TENSORS), TENSORS.items())
