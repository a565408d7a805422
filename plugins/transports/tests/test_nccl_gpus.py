"""The transport `nccl` between real GPUs, each with a process of its own."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from dovetail.errors import ConfigError, ReceiverError, WeightSyncError
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing.transport_ends import (
    TransportEnd,
    TransportPlace,
    case_tensors,
    contents,
    manifest_of,
)
from dovetail_transports.config import NcclConfig
from dovetail_transports.nccl.transport import NcclTransport

GPUS = torch.cuda.device_count()


def between_gpus(folder: Path, timeout: float = 60.0, receiver: str = "cuda:1") -> TransportPlace:
    return TransportPlace(
        plugin=NcclTransport,
        config=NcclConfig(name="nccl", timeout=timeout),
        run_directory=folder,
        device="cuda:0",
        receiver_devices=(receiver,),
    )


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_updates_arrive_on_another_gpu(tmp_path: Path) -> None:
    place = between_gpus(tmp_path)
    with TransportEnd(place, "receiver") as receiver, TransportEnd(place, "sender") as sender:
        for version, bucket_bytes in ((1, 300), (2, 1 << 20), (3, 64)):
            tensors = case_tensors(seed=version)
            manifest = attrs.evolve(manifest_of(tensors, version, bucket_bytes), receivers=1)
            manifest = sender.prepare(manifest)
            receiver.receive(manifest)
            sender.send(manifest, seed=version).answer(120)
            assert receiver.answer(120) == contents(iter(tensors.items()))


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_sender_outlives_a_receiver_that_is_killed_and_sends_to_its_successor(
    tmp_path: Path,
) -> None:
    place = between_gpus(tmp_path, timeout=30.0)
    tensors = case_tensors()
    manifest = attrs.evolve(manifest_of(tensors, 1, 64), receivers=1)
    with TransportEnd(place, "sender") as sender:
        with TransportEnd(place, "receiver") as killed:
            manifest = sender.prepare(manifest)
            killed.receive(manifest, hang_after="norm.weight")
            sender.send(manifest, seed=0)
            killed.await_hang()
            killed.kill()
            with pytest.raises(ReceiverError, match=r"receiver\.0 .* ended"):
                sender.answer(60)
        with TransportEnd(place, "receiver") as successor:
            manifest = attrs.evolve(manifest, version=2, update_id="again")
            successor.receive(manifest)
            sender.send(manifest, seed=0).answer(120)
            assert successor.answer(120) == contents(iter(tensors.items()))


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("memory", ["0", "-2"])
def test_who_shares_memory_in_no_way_is_refused_and_who_shares_it_as_nccl_does_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    place = between_gpus(tmp_path)
    tensors = case_tensors()
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", memory)
    with TransportEnd(place, "receiver") as receiver:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
        with TransportEnd(place, "sender") as sender:
            manifest = sender.prepare(attrs.evolve(manifest_of(tensors), receivers=1))
            receiver.receive(manifest)
            sender.send(manifest, seed=0)
            if memory == "0":
                for end in (sender, receiver):
                    with pytest.raises(WeightSyncError, match="NCCL_CUMEM_ENABLE=0"):
                        end.answer(60)
            else:
                sender.answer(120)
                assert receiver.answer(120) == contents(iter(tensors.items()))


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_two_processes_on_one_gpu_are_told_of_the_other_transport(tmp_path: Path) -> None:
    place = between_gpus(tmp_path, timeout=30.0, receiver="cuda:0")
    with TransportEnd(place, "receiver") as receiver, TransportEnd(place, "sender") as sender:
        manifest = attrs.evolve(manifest_of(case_tensors()), receivers=1)
        manifest = sender.prepare(manifest)
        receiver.receive(manifest)
        with pytest.raises(WeightSyncError, match=r"the nccl group|broke off"):
            sender.send(manifest, seed=0).answer(120)
        with pytest.raises(WeightSyncError):
            receiver.answer(120)


def test_nccl_on_the_cpu_is_refused() -> None:
    transport = NcclTransport(NcclConfig(name="nccl", backend="nccl"), PluginContext(role="actor"))
    with pytest.raises(ConfigError, match="backend=gloo"):
        transport.sender()


def test_a_host_of_another_machine_is_refused() -> None:
    config = NcclConfig(name="nccl", host="192.0.2.1")
    sender = NcclTransport(config, PluginContext()).sender()
    with pytest.raises(ConfigError, match=r"host='192\.0\.2\.1'"):
        sender.prepare(manifest_of({}))
