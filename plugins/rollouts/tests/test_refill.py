"""Rounds of generation: samples that filters drop, their replacement, and the records in the ledger."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Groups, PluginContext, Prompt, SampleFilter, SamplingParams
from dovetail.sections import PluginSection
from dovetail_datasets.samplers import SequentialSampler
from dovetail_rollouts import Group
from dovetail_rollouts.dynamic_sampler import DynamicSampler


@attrs.frozen(kw_only=True)
class ChosenConfig(PluginSection):
    action: Any


class Chosen(SampleFilter):
    """A filter made from a function; it records the samples that it saw."""

    api = ">=1.1,<2"

    def __init__(self, name: str, action: str, keep: Any) -> None:
        super().__init__(ChosenConfig(name=name, action=action), PluginContext())
        self.name = name  # type: ignore[misc]
        self._keep = keep
        self.saw: list[list[str]] = []

    @classmethod
    def action_of(cls, config: Any) -> Any:
        return config.action

    def keep(self, columns: Batch, groups: Groups) -> Any:
        self.saw.append(list(columns["sample_id"]))
        return self._keep(columns, groups)


def differing(columns: Batch, groups: Groups) -> np.ndarray:
    """Keep groups whose scores are not all equal, as in DAPO."""
    scores = columns["scores"]
    spread = np.array([np.ptp(scores[groups.index_N == g]) for g in range(groups.count)])
    return (spread > 0)[groups.index_N]


def equal_rewards() -> Chosen:
    return Chosen("equal", "drop", differing)


def negative(action: str, name: str = "negative") -> Chosen:
    return Chosen(name, action, lambda columns, _: columns["scores"] >= 0)


def rollout_of(wanted: int, *filters: Chosen, **options: Any) -> DynamicSampler:
    return DynamicSampler(wanted, {f.name: f for f in filters}, temperature=0.7, **options)


def group_of(samples: list[Any], greedy: Any = None) -> Group:
    return Group(
        prompt=samples[0].prompt,
        n=len(samples),
        sampling=SamplingParams(max_new_tokens=8),
        samples=samples,
        greedy=greedy,
        finished=True,
    )


def generated(
    make_sample: Any, scores: dict[int, tuple[float | None, ...]], greedy: Any = None
) -> list[Group]:
    """Return the groups of a round, from the scores of each prompt's samples, and of the greedy responses if given."""
    return [
        group_of(
            [make_sample(prompt, number, score) for number, score in enumerate(row)],
            None if greedy is None else make_sample(prompt, 0, greedy[prompt]),
        )
        for prompt, row in scores.items()
    ]


def kept(rollout: DynamicSampler) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for sample in rollout.kept:
        found.setdefault(sample.group, []).append(sample.score)
    return found


def test_without_filters_everything_that_has_a_score_is_kept_and_nothing_reported(make_sample):
    rollout = rollout_of(3)
    rollout.add(generated(make_sample, {0: (1.0, None), 1: (None, None), 2: (0.0, 0.0)}))
    assert kept(rollout) == {0: [1.0], 2: [0.0, 0.0]}
    assert rollout.reasons == {(0, 1, 0): "reward_failures"}
    assert rollout.metrics == {}
    assert rollout.missing == 1
    assert "loss_mask" not in rollout.batch()


def test_each_round_asks_for_what_is_missing_and_the_order_is_that_of_the_rounds(make_sample):
    rollout = rollout_of(3, equal_rewards(), refills=True)
    rollout.add(generated(make_sample, {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.0, 0.0)}))
    assert (rollout.missing, rollout.prompts, rollout.count) == (2, 3, 1)
    rollout.add(generated(make_sample, {3: (0.0, 0.0), 4: (2.0, 0.0)}))
    assert (rollout.missing, rollout.prompts) == (1, 5)
    rollout.add(generated(make_sample, {5: (0.0, 3.0)}))
    assert rollout.missing == 0
    assert list(kept(rollout)) == [1, 4, 5]
    assert rollout.metrics == {
        "filter/equal/dropped_samples": 6,
        "filter/equal/dropped_groups": 3,
        "filter/kept_groups": 3,
        "filter/rounds": 3,
        "filter/generated_prompts": 6,
    }
    assert rollout.reasons == dict.fromkeys([(0, g, 0) for g in (0, 2, 3)], "filter:equal")
    batch = rollout.batch()
    assert batch["temperature"].tolist() == [np.float32(0.7)] * len(batch)
    assert batch["group_id"].tolist() == [1, 1, 4, 4, 5, 5]
    assert batch["trajectory_id"].tolist() == list(range(6))


def test_groups_are_numbered_by_their_place_in_the_step_whatever_prompt_they_answer(make_sample):
    rollout = rollout_of(3, baseline=True)
    rollout.add(generated(make_sample, {4: (1.0, 0.0), 9: (None, 0.0)}, greedy={4: 1.0, 9: 2.0}))
    rollout.add(generated(make_sample, {7: (1.0,)}, greedy={7: 3.0}))
    assert [s.group for s in rollout.samples] == [0, 0, 1, 1, 2]
    assert [s.group for s in rollout.greedy] == [0, 1, 2]
    assert [s.prompt.key[1] for s in rollout.samples] == [4, 4, 9, 9, 7]
    assert [row["baseline_score"] for row in rollout.rows(rollout.samples)] == [1, 1, 2, 2, 3]
    assert rollout.batch()["baseline_scores"].tolist() == [1, 1, 2, 3]


def test_a_filter_sees_only_its_round_and_only_what_earlier_filters_left(make_sample):
    first, second = negative("drop"), equal_rewards()
    rollout = rollout_of(2, first, second)
    rollout.add(generated(make_sample, {0: (-1.0, 1.0, 1.0), 1: (0.0, 1.0, None)}))
    rollout.add(generated(make_sample, {2: (-1.0, -1.0, -1.0)}))
    assert [len(saw) for saw in first.saw] == [5, 3]
    assert [len(saw) for saw in second.saw] == [4]  # all of round 2 was dropped
    assert kept(rollout) == {1: [0.0, 1.0]}
    assert rollout.reasons == {(0, 0, 0): "filter:equal", (0, 2, 0): "filter:negative"}
    assert rollout.metrics["filter/negative/dropped_samples"] == 4
    assert rollout.metrics["filter/negative/dropped_groups"] == 1
    assert rollout.metrics["filter/equal/dropped_groups"] == 1


def test_a_thinned_group_is_kept_and_not_replaced(make_sample):
    rollout = rollout_of(1, negative("drop"))
    rollout.add(generated(make_sample, {0: (-1.0, 2.0, 1.0)}))
    assert rollout.missing == 0
    assert kept(rollout) == {0: [2.0, 1.0]}
    assert rollout.reasons == {}


def test_masked_samples_stay_in_their_group_without_a_loss(make_sample):
    after = Chosen("after", "drop", lambda columns, _: np.ones(len(columns), np.bool_))
    rollout = rollout_of(2, negative("mask"), after)
    rollout.add(generated(make_sample, {0: (-1.0, 2.0), 1: (1.0, 3.0)}))
    batch = rollout.batch()
    assert batch["scores"].tolist() == [-1, 2, 1, 3]
    assert batch["response_mask"].values.all()
    assert batch["loss_mask"].to_list() == [[False] * 3, [True] * 3, [True] * 3, [True] * 3]
    assert [len(saw) for saw in after.saw] == [4]
    assert rollout.metrics["filter/negative/masked_samples"] == 1
    assert rollout.missing == 0


def test_nothing_left_is_no_error(make_sample):
    rollout = rollout_of(2, equal_rewards())
    rollout.add(generated(make_sample, {0: (1.0, 1.0), 1: (None, None)}))
    assert len(rollout.batch()) == 0
    assert rollout.reasons == {(0, 0, 0): "filter:equal", (0, 1, 0): "reward_failures"}


def test_a_round_of_which_nothing_could_be_scored_reaches_no_filter(make_sample):
    broken = Chosen("broken", "drop", lambda *_: 1 / 0)
    rollout = rollout_of(1, broken)
    rollout.add(generated(make_sample, {0: (None, None)}))
    assert rollout.missing == 1
    assert broken.saw == []


def test_groups_without_the_score_of_their_baseline_are_out_before_filters(make_sample):
    chosen = equal_rewards()
    rollout = rollout_of(3, chosen, baseline=True)
    scores = {0: (0.0, 1.0), 1: (0.0, 1.0), 2: (None, None)}
    rollout.add(generated(make_sample, scores, greedy={0: 0.5, 1: None, 2: None}))
    assert len(chosen.saw[0]) == 2
    assert rollout.batch()["baseline_scores"].tolist() == [0.5, 0.5]
    assert rollout.reasons == {(0, 1, 0): "baseline_failures", (0, 2, 0): "reward_failures"}
    assert [s.score for s in rollout.greedy] == [0.5, None, None]


def test_rows_say_which_filter_took_a_sample(make_sample):
    rollout = rollout_of(2, negative("mask", "low"), equal_rewards(), baseline=True)
    rollout.add(generated(make_sample, {0: (1.0, 1.0), 1: (-1.0, 1.0)}, greedy={0: 0.5, 1: 2.0}))
    rows = rollout.rows(rollout.samples)
    assert [row.get("filtered") for row in rows] == ["equal", "equal", None, None]
    assert [row.get("masked") for row in rows] == [None, None, "low", None]
    assert [row["baseline_score"] for row in rows] == [0.5, 0.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda columns, _: columns["scores"], "float32 of shape"),
        (lambda *_: np.ones(1, np.bool_), "bool of shape"),
        (lambda columns, _: [True] * len(columns), "list"),
        (lambda columns, _: columns["scor"], None),
        (lambda *_: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_filter_that_errs_is_named(make_sample, answer, said):
    rollout = rollout_of(1, Chosen("mine", "drop", answer))
    if said is None:  # Dovetail's own errors are raised unchanged
        with pytest.raises(Exception, match="no column 'scor'"):
            rollout.add(generated(make_sample, {0: (1.0, 1.0)}))
        return
    with pytest.raises(PluginBrokenError, match="sample_filter/Chosen") as caught:
        rollout.add(generated(make_sample, {0: (1.0, 1.0)}))
    assert said in str(caught.value)


@given(
    st.lists(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=2, max_size=3), max_size=12),
    st.integers(1, 5),
)
def test_every_prompt_is_trained_on_or_has_a_reason(make_sample, scores, wanted):
    rollout = rollout_of(wanted, equal_rewards())
    left = dict(enumerate(map(tuple, scores)))
    while rollout.missing and left:
        size = min(rollout.missing, len(left))
        rollout.add(generated(make_sample, {g: left.pop(g) for g in list(left)[:size]}))
    used = {sample.prompt.key for sample in rollout.kept}
    seen = {sample.prompt.key for sample in rollout.samples}
    assert used | rollout.reasons.keys() == seen
    assert not used & rollout.reasons.keys()
    assert len(used) == wanted - rollout.missing <= wanted


# -- with the loader and the ledger ------------------------------------------------------------


def loader_of(count: int, batch: int) -> tuple[PromptLoader, Ledger]:
    ledger = Ledger()
    prompts = [Prompt(index=i, prompt_ids=np.arange(2), raw=str(i)) for i in range(count)]
    sampler = SequentialSampler(PluginSection(), PluginContext())
    return PromptLoader(prompts, sampler, batch, ledger), ledger


def one_step(
    loader: PromptLoader,
    ledger: Ledger,
    make_sample: Any,
    number: int,
    *,
    stop_after: int | None = None,
) -> DynamicSampler | None:
    """Run a step of three rounds in which only odd prompts have different scores; abandon the step after round `stop_after`, if given."""
    issued: list[Prompt] = loader.next_batch()
    rollout = rollout_of(len(issued), equal_rewards(), refills=True)
    while True:
        rollout.add(
            [
                group_of(
                    [
                        make_sample(
                            item.index,
                            i,
                            float(i * (item.index % 2)),
                            epoch=item.epoch,
                        )
                        for i in range(2)
                    ]
                )
                for item in issued
            ]
        )
        for item in issued:
            ledger.take(*item.key, step=number)
        if rollout.count == stop_after:
            ledger.give_back(number)
            return None
        if not rollout.missing or rollout.count == 3:
            break
        issued = loader.next_batch(rollout.missing)
    used = {sample.prompt.key for sample in rollout.kept}
    for key in ledger.taken(number):
        if key in used:
            ledger.use(*key)
        else:
            ledger.drop(*key, rollout.reasons[key])
    return rollout


def run_steps(make_sample: Any, steps: int, stop: tuple[int, int] | None = None) -> tuple[Any, Any]:
    """Return the sample ids of every step and the ledger's counts; after the stop (step, round), resume from saved states."""
    loader, ledger = loader_of(10, 4)
    trained = []
    for step in range(steps):
        if stop is not None and step == stop[0]:
            assert one_step(loader, ledger, make_sample, step, stop_after=stop[1]) is None
            states = loader.state(), ledger.state()
            loader, ledger = loader_of(10, 4)
            loader.load_state(states[0])
            ledger.load_state(states[1])
        rollout = one_step(loader, ledger, make_sample, step)
        assert rollout is not None
        trained.append([sample.sample_id for sample in rollout.samples])
    ledger.check()
    return trained, ledger.counts()


@pytest.mark.parametrize("stop", [(0, 1), (0, 2), (1, 1), (2, 3), (3, 2)])
def test_an_abandoned_step_comes_again_with_the_same_prompts_in_the_same_rounds(make_sample, stop):
    whole = run_steps(make_sample, 5)
    assert run_steps(make_sample, 5, stop) == whole


def test_the_loader_runs_on_into_the_next_epoch_for_refills(make_sample):
    trained, counts = run_steps(make_sample, 3)
    assert sum(map(len, trained)) == 2 * (counts["used"] + counts["dropped"]["filter:equal"])
    assert counts["open"] == 0
    assert counts["complete_epochs"] >= 1
