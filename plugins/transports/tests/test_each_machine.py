"""A run on several machines: the first rank of each machine sends to the receivers there, and to no others."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from dovetail.errors import CalledOffError, ReceiverError
from dovetail.interfaces import PluginContext, TensorSpec, WeightManifest
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.transport import SharedMemoryTransport

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def made(
    directory: Path, machine: str | None, rank: int = 0, seconds: float = 5.0, **context: Any
) -> SharedMemoryTransport:
    """The transport of a process; machines are only names, since all processes run on this machine."""
    return SharedMemoryTransport(
        SharedMemoryConfig(name="shared_memory", timeout=seconds),
        PluginContext(
            run_directory=directory / "run", machine=machine, rank=rank, role="r", **context
        ),
    )


def manifest_of(receivers_on: Mapping[str, int], **fields: Any) -> WeightManifest:
    return WeightManifest(
        version=3,
        tensors=tuple(
            TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).partition(".")[2])
            for name, t in WEIGHTS.items()
        ),
        receivers=sum(receivers_on.values()),
        receivers_on=receivers_on,
        **fields,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def test_every_machine_has_a_sender_and_its_receivers_get_that_ones_tensors(place: Path) -> None:
    # Ranks 0 and 1 are on one machine, 2 and 3 on the other, which has two receivers.
    manifest = manifest_of({"one": 1, "two": 2}, bucket_bytes=8)
    where = [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    senders = [made(place, m, rank, machine_rank=k).sender() for rank, (m, k) in enumerate(where)]
    receivers = [made(place, machine).receiver() for machine in ("one", "two", "two")]
    marked = [{**WEIGHTS, "a": WEIGHTS["a"] + rank} for rank in range(4)]
    with ThreadPoolExecutor(8) as threads:
        arriving = [
            threads.submit(lambda r=r: {k: v.clone() for k, v in r.receive(manifest)})
            for r in receivers
        ]
        sending = [
            threads.submit(sender.send, manifest, iter(tensors.items()))
            for sender, tensors in zip(senders, marked, strict=True)
        ]
        for sent in sending:
            sent.result(20)
        found = [arrived.result(20) for arrived in arriving]
    assert [(got["a"] - WEIGHTS["a"]).unique().tolist() for got in found] == [[0.0], [2.0], [2.0]]
    assert all(torch.equal(got["b"], WEIGHTS["b"]) for got in found)
    for end in (*senders, *receivers):
        end.close()


def test_a_machine_without_receivers_gathers_and_sends_to_nobody(place: Path) -> None:
    gathered = []

    def tensors() -> Any:
        for name, tensor in WEIGHTS.items():
            gathered.append(name)
            yield name, tensor

    made(place, "three", 4).sender().send(manifest_of({"one": 1}), tensors())
    assert gathered == ["a", "b"]


def test_a_receiver_that_is_missing_is_missed_on_its_own_machine(place: Path) -> None:
    other = made(place, "one").receiver()
    with pytest.raises(ReceiverError, match="no receiver registered"):
        made(place, "two", 2, seconds=0.3).sender().send(
            manifest_of({"one": 1, "two": 1}), iter(WEIGHTS.items())
        )
    other.close()


def test_an_update_is_called_off_on_every_machine(place: Path) -> None:
    manifest = manifest_of({"one": 1, "two": 1})
    senders = [made(place, m, k, seconds=20).sender() for k, m in enumerate(("one", "two"))]
    with ThreadPoolExecutor(2) as threads:
        sending = [threads.submit(s.send, manifest, iter(WEIGHTS.items())) for s in senders]
        # The controller does not know its machine, so its note is in the run's directory.
        made(place, None).call_off(manifest, "replica 1 died")
        for sent in sending:
            with pytest.raises(CalledOffError, match="replica 1 died"):
                sent.result(10)
    assert [path.suffix for path in (place / "run").iterdir()] == [".off"]
    again = attrs.evolve(manifest, update_id="again", receivers_on={"one": 1}, receivers=1)
    with ThreadPoolExecutor(1) as threads:
        receiver = made(place, "one").receiver()
        arriving = threads.submit(lambda: [name for name, _ in receiver.receive(again)])
        senders[0].send(again, iter(WEIGHTS.items()))
        assert arriving.result(10) == ["a", "b"]
    assert not list((place / "run").iterdir())
    for end in (*senders, receiver):
        end.close()
