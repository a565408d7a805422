"""Batches through the codec: arguments and results are as without the codec, and each value is sent once."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from dovetail.batch import Batch, Ragged, RaggedRows, StoredArray
from dovetail.dispatch import Dispatch, Future, Mesh, Worker, nd, register
from dovetail.errors import WorkerError
from dovetail.interfaces import Plugin
from dovetail.metrics import Mean
from dovetail.workers import RankFailure
from dovetail.workers.group import run_on_worker
from dovetail_runtime_ray.columns import BatchCodec
from dovetail_sdk.testing import SimulatedGroup

calm = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

SHELF: dict[int, list] = {}
"""Stored arrays, each with its number of references, by key."""
KEYS = count()


class Reference:
    """A reference that keeps its array stored, and can be pickled."""

    def __init__(self, key: int):
        self.key = key
        SHELF[key][1] += 1

    def __reduce__(self):
        return Reference, (self.key,)

    def __del__(self):
        SHELF[self.key][1] -= 1
        if not SHELF[self.key][1]:
            del SHELF[self.key]


class Shelf:
    """One process's access to the stored arrays; counts the bytes that the process puts and gets."""

    def __init__(self):
        self.put_bytes = self.got_bytes = self.puts = 0

    def put(self, arrays):
        references = []
        for array in arrays:
            key = next(KEYS)
            kept = array.copy()
            kept.flags.writeable = False
            SHELF[key] = [kept, 0]
            self.put_bytes += array.nbytes
            references.append(Reference(key))
        self.puts += 1
        return references

    def get(self, references):
        arrays = [SHELF[reference.key][0] for reference in references]
        self.got_bytes += sum(array.nbytes for array in arrays)
        return arrays


class CodecGroup(SimulatedGroup):
    """A group of workers behind the codec, as in other processes."""

    def __init__(self, worker_class, mesh, *, along=0, driver=None):
        self.store, self.stores = Shelf(), [Shelf() for _ in range(mesh.size)]
        self.driver = driver or BatchCodec(self.store, along=along)
        self.ends = [BatchCodec(store, along=along) for store in self.stores]
        super().__init__(worker_class, mesh)

    def _invoke(self, method, calls):
        sent = [pickle.loads(pickle.dumps(payload)) for payload in self.driver.encode(calls)]
        return Future.completed(
            self.driver.decode_results(
                [
                    payload if payload is None else self._run(rank, method, payload)
                    for rank, payload in enumerate(sent)
                ]
            )
        )

    def _run(self, rank, method, payload):
        end = self.ends[rank]
        result = run_on_worker(self.workers[rank], method, end.decode(payload))
        if isinstance(result, RankFailure):
            return result
        return pickle.loads(pickle.dumps(end.encode_result(result)))


class Engine(Worker, Plugin):
    """A worker that scores tokens by their ids, and records its arguments."""

    def start(self):
        self.seen: list[Batch] = []

    @register(dispatch_mode=nd("train"))
    def forward(self, batch, outputs):
        self.seen.append(batch)
        ids = batch["response_ids"]
        scored = ids.with_values(ids.values.astype(np.float32) / 3)
        return Batch(
            {name: scored.with_values(scored.values + i) for i, name in enumerate(outputs)}
        )

    @register(dispatch_mode=nd("train", unit="group"))
    def update(self, mini_batch, objective, *, others=None):
        self.seen += [mini_batch] if others is None else [mini_batch, others]
        tokens = float(mini_batch["response_ids"].values.sum())
        return {"actor/tokens": Mean(tokens * objective, 1.0)}

    @register(dispatch_mode=nd("train"))
    def back(self, batch):
        return batch, None, (batch.select(["response_ids"]),)

    @register(dispatch_mode=nd("train"))
    def only_lengths(self, batch):
        return Batch({"n": batch["response_ids"].lengths})

    @register(dispatch_mode=nd("train"))
    def fail(self, batch):
        raise KeyError(batch["response_ids"].to_list()[0][0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, batch, option):
        self.seen.append(batch)
        return option

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self):
        return {"rank": self.rank}


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    gc.collect()
    assert not SHELF


@st.composite
def steps(draw) -> Batch:
    """A step's batch: columns of every kind, some with a value for each response token, with empty rows."""
    count = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    offsets = np.cumsum([0, *lengths])
    columns = {
        "group_id": np.sort(draw(hnp.arrays(np.int64, count, elements=st.integers(0, 4)))),
        "prompt_ids": Ragged.from_list([[i] * (i % 3) for i in range(count)], np.int64),
        "response_ids": Ragged(np.arange(offsets[-1]), offsets),
        "response_mask": Ragged(draw(hnp.arrays(np.bool_, int(offsets[-1]))), offsets),
        "sample_id": [f"s{i}" for i in range(count)],
    }
    for number, dtype in enumerate(
        draw(st.lists(st.sampled_from(["bool", "int64", "float32", "float64"]), max_size=3))
    ):
        if draw(st.booleans()):
            inner = draw(st.sampled_from([(), (3,), (2, 2)]))
            values = draw(hnp.arrays(dtype, (int(offsets[-1]), *inner)))
            columns[f"mine.{number}"] = Ragged(values, offsets)
        else:
            columns[f"mine.{number}"] = draw(hnp.arrays(dtype, (count, 2)))
    return Batch(columns)


MESHES = st.sampled_from([Mesh(dp=1), Mesh(dp=2), Mesh(dp=3), Mesh(dp=2, cp=2), Mesh(dp=5)])


@calm
@given(steps(), MESHES, st.sampled_from([0, 24, 1 << 16]), st.data())
def test_a_step_is_bit_for_bit_that_without_a_codec(batch, mesh, along, data):
    through, local = CodecGroup(Engine, mesh, along=along), SimulatedGroup(Engine, mesh)
    order = np.array(data.draw(st.permutations(range(len(batch)))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=2)))
    outcomes = []
    for group in (through, local):
        scored = group.forward(batch, ["old_log_probs", "values"]).result()
        full = batch.with_columns(scored.columns)
        again = group.forward(full.drop(["values"]), ["ref_log_probs"]).result()
        full = full.with_columns(
            {"ref_log_probs": again["ref_log_probs"], "more": scored["values"]}
        )
        metrics = []
        for rows in [*np.split(order, cuts), np.sort(order)]:
            if rows.size:
                part = full.take(rows)
                metrics.append(group.update(part, 0.5, others=part.select(["values"])).result())
        returned, nothing, (ids,) = group.back(full.take(order)).result()
        assert nothing is None
        outcomes.append((scored, full, returned, ids, metrics, group.first().result()))
        outcomes[-1] += (group.whole(full, 7).result(),)
    for one, other in zip(*outcomes, strict=True):
        assert one.equals(other) if isinstance(one, Batch) else one == other
    for there, here in zip(through.workers, local.workers, strict=True):
        assert len(there.seen) == len(here.seen)
        for one, other in zip(there.seen, here.seen, strict=True):
            assert one.equals(other)


def step(samples: int = 8, tokens: int = 50) -> Batch:
    offsets = np.arange(samples + 1) * tokens
    ids = Ragged(np.arange(samples * tokens), offsets)
    return Batch(
        {
            "group_id": np.arange(samples) // 2,
            "prompt_ids": ids.with_values(ids.values * 2),
            "response_ids": ids,
            "response_mask": ids.with_values(np.ones(samples * tokens, np.bool_)),
            "sample_id": [str(i) for i in range(samples)],
        }
    )


def scored_by_two(group: CodecGroup, batch: Batch) -> Batch:
    """The batch with the columns of three forward passes."""
    for name in ("old_log_probs", "ref_log_probs", "values"):
        batch = batch.with_columns(group.forward(batch, [name]).result().columns)
    return batch


def test_tokens_are_put_once_and_results_never_pass_through_the_driver():
    group, batch = CodecGroup(Engine, Mesh(dp=2)), step()
    full = scored_by_two(group, batch)
    group.update(full, 1.0).result()
    tokens = sum(batch[name].nbytes for name in ("prompt_ids", "response_ids", "response_mask"))
    assert group.store.put_bytes == tokens
    assert group.store.got_bytes == 0
    assert group.store.puts == 2  # the columns of a share are put together
    # Each rank puts its share of three float32 columns.
    assert [store.put_bytes for store in group.stores] == [3 * 200 * 4] * 2
    assert full["values"].finite()
    assert group.store.got_bytes == 0
    assert full["values"].values[-1] == np.float32(399) / 3
    assert group.store.got_bytes == 400 * 4


def test_a_rank_reads_its_own_chunk_in_place():
    group, batch = CodecGroup(Engine, Mesh(dp=2)), step()
    full = scored_by_two(group, batch)
    group.forward(full, ["log_probs"]).result()
    arrays = [array for array, _ in SHELF.values()]
    for worker in group.workers:
        for name in ("response_ids", "old_log_probs", "values"):
            values = worker.seen[-1][name].values
            assert sum(np.shares_memory(values, array) for array in arrays) == 1
            assert not values.flags.writeable


def test_ranks_that_replicate_share_one_object():
    group, batch = CodecGroup(Engine, Mesh(dp=2, cp=2)), step()
    sent = group.driver.encode([((step(), frozenset({"a"})), {})] * 4)
    assert all(payload is sent[0] for payload in sent)
    group.forward(batch, ["log_probs"]).result()
    shares = [worker.seen[0]["response_ids"].values for worker in group.workers]
    assert [np.shares_memory(shares[0], share) for share in shares] == [True, True, False, False]


@pytest.mark.parametrize("epochs", [1, 3])
def test_mini_batches_put_each_row_once_in_however_many_passes(epochs):
    group, batch = CodecGroup(Engine, Mesh(dp=2)), step()
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        for groups in np.split(rng.permutation(4), 2):
            rows = np.flatnonzero(np.isin(batch["group_id"], groups))
            group.update(batch.take(rows), 1.0).result()
    tokens = sum(batch[name].nbytes for name in ("prompt_ids", "response_ids", "response_mask"))
    assert group.store.put_bytes == tokens
    assert group.store.got_bytes == 0


def test_what_an_engine_does_not_read_is_not_fetched():
    group, batch = CodecGroup(Engine, Mesh(dp=2)), step()
    assert group.only_lengths(batch).result()["n"].tolist() == [50] * 8
    assert [store.got_bytes for store in group.stores] == [0, 0]
    group.forward(batch, ["log_probs"]).result()
    assert [store.got_bytes for store in group.stores] == [200 * 8] * 2


def test_what_is_not_finite_is_known_without_fetching_and_found_by_fetching():
    class Overflows(Engine):
        def forward(self, batch, outputs):
            ids = batch["response_ids"]
            return Batch({"values": ids.with_values(np.where(ids.values == 7, np.nan, 1.0))})

    group = CodecGroup(Overflows, Mesh(dp=2))
    values = group.forward(step(), []).result()["values"]
    assert not values.finite()
    assert np.flatnonzero(~np.isfinite(values.values)).tolist() == [7]
    assert values.take(np.arange(4, 8)).finite()


def test_the_store_is_empty_again_after_every_step():
    group = CodecGroup(Engine, Mesh(dp=2))
    for _ in range(5):
        full = scored_by_two(group, step())
        for rows in np.split(np.arange(8), 2):
            group.update(full.take(rows[::-1]), 1.0).result()
        held = len(SHELF)
        full = None
        for worker in group.workers:
            worker.seen.clear()
        assert held
        assert not SHELF


def test_a_selection_keeps_only_the_chunks_that_it_needs():
    group = CodecGroup(Engine, Mesh(dp=4))
    kept = group.forward(step(), ["values"]).result()["values"].take(np.array([5, 4]))
    for worker in group.workers:
        worker.seen.clear()
    assert 1 <= len(SHELF) <= 2
    assert kept.values[0] == np.float32(250) / 3


def test_roles_and_threads_share_what_was_put():
    actor, batch = CodecGroup(Engine, Mesh(dp=2)), step(64)
    ref = CodecGroup(Engine, Mesh(dp=2), driver=actor.driver)
    with ThreadPoolExecutor(4) as threads:
        groups = [actor, ref] * 4
        results = list(threads.map(lambda group: group.forward(batch, ["v"]).result(), groups))
    assert all(result.equals(results[0]) for result in results)
    tokens = sum(batch[name].nbytes for name in ("prompt_ids", "response_ids", "response_mask"))
    assert actor.store.put_bytes == tokens


def test_small_columns_go_along_and_come_back_as_they_are():
    group, batch = CodecGroup(Engine, Mesh(dp=2), along=1 << 16), step()
    scored = group.forward(batch, ["old_log_probs"]).result()
    group.update(batch.with_columns(scored.columns), 1.0).result()
    assert group.store.put_bytes == 0
    assert [store.put_bytes for store in group.stores] == [0, 0]
    assert not any(
        isinstance(source, StoredArray) for source in RaggedRows.of(scored["old_log_probs"]).sources
    )


def test_a_failure_passes_as_it_is_and_lets_go_of_the_batch():
    group, batch = CodecGroup(Engine, Mesh(dp=2)), step()
    with pytest.raises(WorkerError, match=r"rank 0 of 2 failed: KeyError: 0"):
        group.fail(batch).result()


def test_closing_forgets_what_was_put():
    group, batch = CodecGroup(Engine, Mesh(dp=2)), step()
    group.only_lengths(batch).result()
    assert SHELF
    group.driver.close()
    assert not SHELF
    assert len(group.only_lengths(batch).result()) == 8
