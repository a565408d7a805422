"""The codec over a real object store: between real processes values stay in shared memory, and are freed."""

from __future__ import annotations

import gc
import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import ray

from dovetail.batch import Batch, Ragged, RaggedRows, StoredArray
from dovetail.dispatch import Future, Mesh, Worker, nd, register
from dovetail.errors import WorkerError
from dovetail.interfaces import Plugin, PluginContext
from dovetail.metrics import Max
from dovetail.workers import WorkerGroup
from dovetail.workers.group import run_on_worker
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_runtime_ray.store import Bundle, RayStore


def references() -> int:
    """The number of objects that this process refers to."""
    gc.collect()
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


class Engine(Worker, Plugin):
    """A worker that scores tokens by their ids."""

    @register(dispatch_mode=nd("train"))
    def forward(self, batch, output):
        ids = batch["response_ids"]
        return Batch({output: ids.with_values(ids.values.astype(np.float32) / 3)})

    @register(dispatch_mode=nd("train"))
    def update(self, mini_batch):
        ids, old = (mini_batch[name].values for name in ("response_ids", "old_log_probs"))
        off = float(np.abs(ids / 3 - old).max())
        copies = float(ids.flags.writeable + old.flags.writeable)
        return {"actor/off": Max(off), "actor/copies": Max(copies)}


@ray.remote(num_cpus=0)
class Rank:
    """A process with one worker behind a codec."""

    def __init__(self, mesh, rank):
        self._worker = Engine(None, PluginContext(mesh=mesh, rank=rank))
        self._codec = BatchCodec(RayStore())

    def call(self, method, payload):
        return self._codec.encode_result(
            run_on_worker(self._worker, method, self._codec.decode(payload))
        )

    def references(self):
        return references()


class Group(WorkerGroup):
    """Workers in processes of their own."""

    def __init__(self, mesh):
        super().__init__(Engine, mesh)
        self.codec = BatchCodec(RayStore())
        self.ranks = [Rank.remote(mesh, rank) for rank in range(mesh.size)]

    def _invoke(self, method, calls):
        payloads = self.codec.encode(calls)
        sent = [rank.call.remote(method, p) for rank, p in zip(self.ranks, payloads, strict=True)]
        return Future(lambda timeout: self.codec.decode_results(ray.get(sent, timeout=timeout)))

    def close(self):
        for rank in self.ranks:
            ray.kill(rank)


@pytest.fixture(scope="module", autouse=True)
def cluster(no_cluster, tmp_path_factory):
    short = Path(f"/tmp/dv{os.getpid()}")  # a socket's path must be short
    short.symlink_to(tmp_path_factory.mktemp("ray"))
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=96 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(short),
    )
    yield
    ray.shutdown()
    short.unlink()


@pytest.fixture
def group():
    with closing(Group(Mesh(dp=2))) as group:
        yield group


def step(samples: int = 64, tokens: int = 8192) -> Batch:
    """A batch with 4 MB of int64 tokens by default, more than is sent within a call."""
    offsets = np.arange(samples + 1) * tokens
    ids = Ragged(np.arange(samples * tokens), offsets)
    return Batch(
        {
            "response_ids": ids,
            "response_mask": ids.with_values(np.ones(len(ids.values), np.bool_)),
            "sample_id": [str(i) for i in range(samples)],
        }
    )


def test_a_step_over_processes_in_which_the_controller_reads_nothing(group):
    batch = step()
    for output in ("old_log_probs", "ref_log_probs"):
        batch = batch.with_columns(group.forward(batch, output).result().columns)
    metrics = group.update(batch).result()
    assert metrics["actor/off"].value < 0.01
    assert metrics["actor/copies"].value == 0  # read-only views of shared memory
    metrics = group.update(batch.take(np.arange(1, 64, 3))).result()
    assert metrics["actor/off"].value < 0.01
    for name in ("old_log_probs", "ref_log_probs"):
        assert batch[name].finite()
        sources = RaggedRows.of(batch[name]).sources
        assert [isinstance(one, StoredArray) and one.fetched for one in sources] == [False, False]
    expected = batch["response_ids"].values.astype(np.float32) / 3
    assert np.array_equal(batch["old_log_probs"].values, expected)


def test_many_steps_leave_nothing_in_the_store(group):
    def held() -> list[int]:
        return [references(), *ray.get([rank.references.remote() for rank in group.ranks])]

    before = held()
    for _ in range(12):
        batch = step()
        batch = batch.with_columns(group.forward(batch, "old_log_probs").result().columns)
        group.update(batch).result()
        group.update(batch.take(np.arange(0, 64, 2))).result()
    assert held()[0] > before[0]
    del batch
    deadline = time.monotonic() + 120
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert held() == before


def test_values_that_died_with_their_worker_are_one_clear_error(group):
    values = group.forward(step(), "values").result()["values"]
    places = [source.reference for source in values.sources]
    ray.kill(group.ranks[0])

    def read_until(deadline: float) -> None:  # Ray notices a death after about a second
        while time.monotonic() < deadline:
            RayStore().get([(Bundle(bundle.reference), number) for bundle, number in places])
            time.sleep(0.1)

    with pytest.raises(WorkerError, match="Ray's object store"):
        read_until(time.monotonic() + 120)
    with pytest.raises(WorkerError, match="OwnerDied") as caught:
        _ = values.values
    assert "logs/" in str(caught.value.hint)
