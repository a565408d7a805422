"""nd: what is split comes back whole, in the caller's order, over any mesh; units stay together; no rank is left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.batch.partition import token_counts
from dovetail.dispatch import Dispatch, Mesh, Worker, nd, register
from dovetail.errors import DispatchError
from dovetail.interfaces import ObjectiveSpec, Plugin, PluginRef
from dovetail.metrics import Max, Mean
from dovetail.workers import resolve_mode
from dovetail.workers.modes import divide
from dovetail_sdk.testing import SimulatedGroup

calm = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


class Echo(Worker, Plugin):
    """Returns what it is given, and remembers it."""

    def start(self):
        self.seen: list[Batch] = []

    @register(dispatch_mode=nd("train"))
    def echo(self, batch):
        self.seen.append(batch)
        # Only the last stage of a pipeline holds a result, and only one of the ranks that replicate.
        c = self.coordinates
        holds = c["tp"] == c["cp"] == c["ep"] == 0 and c["pp"] == self.mesh.axis_size("pp") - 1
        return batch if holds else "not me"

    @register(dispatch_mode=nd("train", split=("dp", "cp")))
    def echo_dp_cp(self, batch):
        self.seen.append(batch)
        c = self.coordinates
        return batch if c["tp"] == 0 and c["pp"] == self.mesh.axis_size("pp") - 1 else None

    @register(dispatch_mode=nd("train", unit="group"))
    def echo_groups(self, batch):
        return self.echo(batch)

    @register(dispatch_mode=nd("train", unit="pair"))
    def echo_pairs(self, batch):
        return self.echo(batch)

    @register(dispatch_mode=nd("train"))
    def echo_with(self, batch, objective):
        return self.echo(batch)

    @register(dispatch_mode=nd("train"))
    def update(self, mini_batch, objective, *, ref=None):
        self.seen.append(mini_batch)
        tokens = float(mini_batch["response_mask"].values.sum())
        length = mini_batch["response_ids"].lengths.max()
        if ref is not None:
            assert ref["sample_index"].tolist() == mini_batch["sample_index"].tolist()
        return {"actor/tokens": Mean(tokens * objective, tokens), "actor/longest": Max(length)}

    @register(dispatch_mode=nd("train"))
    def both(self, batch):
        return batch, {"n": Mean(len(batch), 1)}, None

    @register(dispatch_mode=nd("train"))
    def answer(self, batch, how):
        return how(self, batch)

    @register(dispatch_mode=nd("infer"))
    def elsewhere(self, batch):
        return batch


def step(lengths: list[int], groups: list[int] | None = None) -> Batch:
    count, total = len(lengths), sum(lengths)
    offsets = np.cumsum([0, *lengths])
    return Batch(
        {
            "sample_index": np.arange(count),
            "group_id": np.array(groups if groups is not None else range(count), np.int64),
            "temperature": np.ones(count, np.float32),
            "prompt_ids": Ragged.from_list([[i] for i in range(count)], np.int64),
            "response_ids": Ragged(np.arange(total), offsets),
            "response_mask": Ragged(np.ones(total, np.bool_), offsets),
            "old_log_probs": Ragged(-np.arange(1, total + 1, dtype=np.float32), offsets),
            "mine.heads": Ragged(
                np.arange(1, 3 * total + 1, dtype=np.float32).reshape(-1, 3), offsets
            ),
            "sample_id": [f"s{i}" for i in range(count)],
        }
    )


MESHES = st.builds(
    lambda sizes, order: Mesh({axis: sizes[axis] for axis in order}),
    st.fixed_dictionaries(
        {
            "dp": st.integers(1, 4),
            "tp": st.integers(1, 2),
            "pp": st.integers(1, 3),
            "cp": st.integers(1, 2),
        }
    ),
    st.permutations(["dp", "tp", "pp", "cp"]),
)
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=10)


@calm
@given(MESHES, LENGTHS)
def test_split_then_collect_is_the_identity(mesh, lengths):
    batch = step(lengths)
    group = SimulatedGroup(Echo, mesh)
    assert group.echo(batch).result().equals(batch)
    assert group.echo(batch=batch).result().equals(batch)
    assert group.echo_dp_cp(batch).result().equals(batch)


@calm
@given(MESHES, LENGTHS, st.data())
def test_every_sample_is_on_one_split_coordinate_and_on_all_its_replicas(mesh, lengths, data):
    group = SimulatedGroup(Echo, mesh)
    group.echo(step(lengths)).result()
    by_dp: dict[int, list[int]] = {}
    for worker in group.workers:
        assert len(worker.seen) == 1  # each rank is called: nobody misses a collective
        share = worker.seen[0]
        assert len(share)
        real = share["sample_index"]
        if "padding" in share:
            real = real[~share["padding"]]
        assert by_dp.setdefault(worker.coordinates["dp"], real.tolist()) == real.tolist()
    assert sorted(i for share in by_dp.values() for i in share) == list(range(len(lengths)))


@calm
@given(MESHES, st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=10))
def test_groups_are_never_divided(mesh, rows):
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    batch = step(lengths, groups)
    workers = SimulatedGroup(Echo, mesh)
    assert workers.echo_groups(batch).result().equals(batch)
    homes: dict[int, set[int]] = {}
    for worker in workers.workers:
        share = worker.seen[0]
        # Padding is whole units as well.
        for group in set(share["group_id"].tolist()):
            assert share["group_id"].tolist().count(group) == groups.count(group)
        if "padding" not in share or not share["padding"].any():
            for group in set(share["group_id"].tolist()):
                homes.setdefault(group, set()).add(worker.coordinates["dp"])
    assert all(len(home) == 1 for home in homes.values())
    assert homes.keys() == set(groups)


def shares_of(batch: Batch, parts: int) -> list[Batch]:
    workers = SimulatedGroup(Echo, Mesh({"dp": parts}))
    assert workers.echo(batch).result().equals(batch)
    return [worker.seen[0] for worker in workers.workers]


@pytest.mark.parametrize(
    ("lengths", "groups", "parts", "together"),
    [
        ([9] * 8, [0, 0, 0, 0, 1, 1, 1, 1], 2, True),
        ([9] * 8, [3, 5, 3, 5, 5, 3, 5, 3], 2, True),  # in any order
        ([9, 1, 4, 6, 7, 3, 2, 8], [0, 0, 1, 1, 2, 2, 3, 3], 4, True),  # equal in sum
        ([9] * 12, [0] * 4 + [1] * 4 + [2] * 4, 2, False),  # eight samples and four would be uneven
        ([9] * 8, [0] * 8, 2, False),
        ([60, 41, 50, 49], [0, 0, 1, 1], 2, True),  # 101 tokens where 100 are possible
        ([60, 44, 50, 40], [0, 0, 1, 1], 2, False),  # 104 tokens where 100 are possible
    ],
)
def test_a_group_stays_on_a_rank_where_that_is_even(lengths, groups, parts, together):
    shares = shares_of(step(lengths, groups), parts)
    homes = [set(share["group_id"].tolist()) for share in shares]
    assert (sum(map(len, homes)) == len(set(groups))) is together


@calm
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), min_size=1), st.integers(1, 4))
def test_whole_groups_make_the_heaviest_part_at_most_2_percent_heavier(rows, parts):
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    batch, heaviest = step(lengths, groups), []
    for given_batch in (batch, batch.drop(["group_id"])):
        division = divide(given_batch, parts, "sample")
        heaviest.append(max(token_counts(batch)[part].sum() for part in division.parts_K))
        assert sorted(np.concatenate(division.parts_K).tolist()) == list(range(len(rows)))
    assert heaviest[0] <= 1.02 * heaviest[1]


@calm
@given(MESHES, LENGTHS)
def test_pairs_are_never_divided(mesh, lengths):
    batch = step(lengths + lengths)
    workers = SimulatedGroup(Echo, mesh)
    assert workers.echo_pairs(batch).result().equals(batch)
    for worker in workers.workers:
        index = worker.seen[0]["sample_index"]
        assert (index[::2] % 2 == 0).all()
        assert (index[1::2] == index[::2] + 1).all()


@calm
@given(MESHES, LENGTHS, st.randoms(use_true_random=False))
def test_pairs_are_found_by_their_ids_where_an_objective_is_of_pairs(mesh, lengths, random):
    ids = np.repeat(np.arange(len(lengths)), 2)
    random.shuffle(ids)
    batch = step(lengths + lengths).with_columns({"pair_id": ids})
    objective = ObjectiveSpec(
        plugin=PluginRef(kind="objective", name="pairs"),
        requires=frozenset(),
        outputs=(),
        unit="pair",
    )
    workers = SimulatedGroup(Echo, mesh)
    assert workers.echo_with(batch, objective).result().equals(batch)
    for worker in workers.workers:
        _, counts = np.unique(worker.seen[0]["pair_id"], return_counts=True)
        assert (counts == 2).all()


@calm
@given(LENGTHS, st.integers(1, 4), st.booleans())
def test_metrics_are_merged_over_split_coordinates_only_once(lengths, dp, through_pickle):
    batch = step(lengths)
    group = SimulatedGroup(Echo, Mesh(dp=dp, tp=2, pp=2), through_pickle=through_pickle)
    metrics = group.update(batch, objective=2.0, ref=batch).result()
    assert metrics["actor/tokens"].weight == sum(lengths)
    assert metrics["actor/tokens"].total == 2.0 * sum(lengths)
    assert metrics["actor/longest"].value == max(lengths)


def test_ranks_without_samples_get_masked_padding():
    batch = step([5, 2, 3])
    group = SimulatedGroup(Echo, Mesh(dp=5))
    assert group.update(batch, 1.0).result()["actor/tokens"].weight == 10
    shares = [worker.seen[0] for worker in group.workers]
    assert [share["padding"].tolist() for share in shares] == [[False]] * 3 + [[True]] * 2
    for padding in shares[3:]:
        assert padding["sample_index"].tolist() == [1]  # the lightest
        assert padding["response_ids"].to_list() == batch.slice(1, 2)["response_ids"].to_list()
        assert padding["response_mask"].to_list() == [[False, False]]
        assert padding["old_log_probs"].to_list() == [[0.0, 0.0]]
        assert padding["mine.heads"].to_list() == [[[0.0, 0.0, 0.0]] * 2]
        assert padding["temperature"].tolist() == [1.0]
    result = group.echo(batch).result()
    assert result.equals(batch)
    assert batch["response_mask"].values.all()


def test_shares_are_balanced_by_tokens():
    lengths = [64, 1, 1, 60, 2, 62, 3, 58]
    group = SimulatedGroup(Echo, Mesh(dp=4))
    group.echo(step(lengths)).result()
    loads = [int(worker.seen[0]["response_ids"].lengths.sum()) for worker in group.workers]
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= 4


def test_one_part_gets_the_batch_itself():
    batch = step([3, 1, 2])
    group = SimulatedGroup(Echo, Mesh(tp=2, pp=2))
    group.echo(batch).result()
    assert all(worker.seen[0] is batch for worker in group.workers)


@pytest.mark.parametrize(
    ("axes", "answering"),
    [
        ({"dp": 2, "cp": 2}, {0, 2}),
        ({"dp": 2, "pp": 2}, {1, 3}),
        ({"dp": 1, "tp": 3}, {0}),
        ({"dp": 3}, {0, 1, 2}),
    ],
)
def test_a_rank_answers_where_its_result_is_read(axes, answering):
    mesh = Mesh(axes)
    mode = resolve_mode(SimulatedGroup(Echo, mesh).modes["echo"])
    assert mode.answering(mesh) == answering
    batch = step([3, 1, 4, 1, 5, 9])
    calls, receipt = mode.split(mesh, (batch,), {})
    results = [call[0][0] if rank in answering else None for rank, call in enumerate(calls)]
    assert mode.collect(mesh, results, receipt)["response_ids"].equals(batch["response_ids"])
    everyone = resolve_mode(Dispatch.ONE_TO_ALL)
    assert everyone.answering(mesh) == set(range(mesh.size))


def test_tuples_are_collected_element_by_element():
    batch = step([3, 1, 2])
    echoed, metrics, nothing = SimulatedGroup(Echo, Mesh(dp=2)).both(batch).result()
    assert echoed.equals(batch)
    assert metrics["n"].total == 3
    assert nothing is None


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (lambda worker, batch: None, None),
        (lambda worker, batch: {}, {}),
        (lambda worker, batch: worker.rank, [0, 1]),
    ],
)
def test_other_results(how, expected):
    assert SimulatedGroup(Echo, Mesh(dp=2)).answer(step([1, 1]), how).result() == expected


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda worker, batch: batch.slice(0, 0),
            "part 0 of the batch has 1 samples, but the method returned 0",
        ),
        (lambda worker, batch: batch if worker.rank else None, "part 0: None, part 1: Batch"),
        (lambda worker, batch: {} if worker.rank else batch, "part 0: Batch, part 1: metrics"),
    ],
)
def test_results_that_do_not_fit_are_refused(how, message):
    with pytest.raises(DispatchError, match=message):
        SimulatedGroup(Echo, Mesh(dp=2)).answer(step([1, 1]), how).result()


def test_calls_that_do_not_fit_are_refused():
    group = SimulatedGroup(Echo, Mesh(dp=2), role="actor")
    batch = step([1, 2, 3])
    with pytest.raises(DispatchError, match="but got dict"):
        group.update({}, 1)
    with pytest.raises(DispatchError, match="argument 0 has 3, argument 'ref' has 2"):
        group.update(batch, 1.0, ref=batch.slice(0, 2))
    with pytest.raises(DispatchError, match="without samples can't") as caught:
        group.echo(batch.slice(0, 0))
    assert "in actor.echo()" in caught.value.__notes__
    with pytest.raises(DispatchError, match="not 3"):
        group.echo_pairs(batch)
    with pytest.raises(
        DispatchError, match="needs the column 'group_id'; the batch has sample_index"
    ):
        group.echo_groups(batch.drop(["group_id"]))
    with pytest.raises(
        DispatchError, match=r"over the mesh 'infer', but.*has Mesh.dp=2, name='train'"
    ):
        group.elsewhere(batch)
