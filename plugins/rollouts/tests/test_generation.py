"""From prompts to scored samples and to columns: requests to the engine, and their results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.batch.columns import check_batch
from dovetail.errors import RolloutError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginContext,
    Prompt,
    RewardManager,
    RolloutRequest,
    SamplingParams,
    Score,
)
from dovetail.sections import PluginSection
from dovetail_rollouts import Generation, Group, RolloutPool, Scorer
from dovetail_rollouts.columns import to_batch
from dovetail_rollouts.sample_metrics import rollout_metrics
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout

SAMPLING = SamplingParams(
    max_new_tokens=6, temperature=0.7, top_p=0.9, top_k=5, stop=("END",), log_probs=True
)


class Tokenizer:
    """A tokenizer whose text is the token ids."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


class Manager(RewardManager):
    """A manager that scores the number of tokens; the greedy response of the prompt `refused` can't be scored."""

    name = "lengths"
    api = ">=1.0,<2"

    def __init__(self, unit: str = "sample", refused: str | None = None) -> None:
        super().__init__(PluginSection(name="lengths"), PluginContext())
        self.unit = unit
        self.refused = refused
        self.seen: list[list[str]] = []

    async def score(self, samples: Any, time: Any) -> list[Outcome]:
        self.seen.append([sample.sample_id for sample in samples])
        return [
            Failure(kind=FailureKind.EXCEPTION, message="no")
            if sample.sample_id.startswith("baseline") and sample.prompt.raw == self.refused
            else Score(value=float(sample.response_length))
            for sample in samples
        ]


def answer(request: RolloutRequest, sample: int) -> list[int]:
    """Return i tokens for sample i of a prompt, so that the first is empty; 5 tokens for a greedy response."""
    return [7] * (5 if request.sampling.temperature == 0 else sample)


def group_of(prompt: int, n: int = 3, *, baseline: bool = False) -> Group:
    made = Prompt(index=prompt, prompt_ids=np.arange(3), raw=f"q{prompt}", epoch=2, attempt=1)
    return Group(prompt=made, n=n, sampling=SAMPLING, baseline=baseline)


async def all_of(groups: Sequence[Group], pool: RolloutPool, scorer: Scorer) -> Generation:
    generation = Generation(pool=pool, scorer=scorer, tokenizer=Tokenizer(), seed=1)
    await asyncio.gather(*generation.begin(groups))
    return generation


def drawn(
    *groups: Group, manager: Manager | None = None, script: Script | None = None
) -> ScriptedRollout:
    """Draw these groups concurrently, and return the engine."""
    engine = ScriptedRollout.following(script or Script(answer=answer))
    pool = RolloutPool([engine])
    scorer = Scorer(manager or Manager(), timeout=5.0)
    asyncio.run(all_of(groups, pool, scorer))
    return engine


def test_samples_come_in_the_order_of_their_numbers_whatever_finishes_first() -> None:
    class Backwards(ScriptedRollout):
        async def submit(self, request: RolloutRequest) -> Any:
            found = [completion async for completion in super().submit(request)]
            for completion in reversed(found):
                yield completion

    group = group_of(4)
    engine = Backwards.following(Script(answer=answer))
    scorer = Scorer(Manager(), timeout=5.0)
    asyncio.run(all_of([group], RolloutPool([engine]), scorer))
    assert [s.sample_id for s in group.samples] == [f"train.e2.p4.a1.s{i}" for i in range(3)]
    assert [s.score for s in group.samples] == [0, 1, 2]
    assert [s.text for s in group.samples] == ["", "7", "7 7"]
    assert [s.prompt.key for s in group.samples] == [(2, 4, 1)] * 3
    assert group.greedy is None
    assert group.finished


def test_groups_that_are_drawn_at_once_keep_their_samples_apart() -> None:
    groups = [group_of(4), group_of(9)]
    drawn(*groups)
    assert [[s.sample_id for s in group.samples] for group in groups] == [
        [f"train.e2.p{prompt}.a1.s{i}" for i in range(3)] for prompt in (4, 9)
    ]


def test_a_baseline_is_one_greedy_request_a_prompt_with_a_stream_of_its_own() -> None:
    group = group_of(4, baseline=True)
    sampled, greedy = drawn(group).requests
    assert group.greedy is not None
    assert (group.greedy.text, group.greedy.score) == ("7 7 7 7 7", 5.0)
    assert greedy.n == 1
    assert greedy.sampling == SamplingParams(max_new_tokens=6, temperature=0.0, stop=("END",))
    assert greedy.streams[0].purpose == "baseline"
    assert greedy.streams[0].key() not in {stream.key() for stream in sampled.streams}
    assert sampled.sampling == SAMPLING
    assert len(group.samples) == 3


def test_what_is_sampled_does_not_depend_on_whether_there_is_a_baseline() -> None:
    without = drawn(group_of(4), group_of(9))
    with_one = drawn(group_of(4, baseline=True), group_of(9, baseline=True))
    sampled = [r.streams for r in with_one.requests if r.streams[0].purpose == "train"]
    assert [r.streams for r in without.requests] == sampled


def test_a_manager_of_groups_sees_a_baseline_apart_from_its_prompts_samples() -> None:
    manager, group = Manager(unit="group"), group_of(4, baseline=True)
    drawn(group, manager=manager)
    assert sorted(map(len, manager.seen)) == [1, 3]
    assert group.greedy is not None
    assert group.greedy.score == 5.0


def columns_of(*groups: Group) -> tuple[list[Any], dict[int, Any]]:
    """Return samples and baselines, with the numbers of their groups as in a step."""
    samples = [attrs.evolve(s, group=i) for i, group in enumerate(groups) for s in group.samples]
    baselines = {i: attrs.evolve(g.greedy, group=i) for i, g in enumerate(groups) if g.greedy}
    return samples, baselines


def test_columns_are_as_the_glossary_says_even_for_an_empty_response() -> None:
    groups = group_of(4, baseline=True), group_of(9, baseline=True)
    drawn(*groups)
    samples, baselines = columns_of(*groups)
    batch = to_batch(samples, temperature=0.7, baselines=baselines)
    check_batch(batch)
    assert batch["response_ids"].lengths.tolist() == [0, 1, 2] * 2
    assert batch["token_rewards"].to_list() == [[], [1.0], [0.0, 2.0]] * 2
    assert batch["scores"].tolist() == [0, 1, 2] * 2
    assert batch["baseline_scores"].tolist() == [5.0] * 6
    assert batch["trajectory_id"].tolist() == list(range(6))
    assert batch["rollout_log_probs"].lengths.tolist() == [0, 1, 2] * 2


def test_a_prompt_whose_baseline_has_no_score_leaves_the_batch_and_is_counted() -> None:
    groups = group_of(4, baseline=True), group_of(9, baseline=True)
    drawn(*groups, manager=Manager(refused="q4"))
    samples, baselines = columns_of(*groups)
    batch = to_batch(samples, temperature=0.7, baselines=baselines)
    assert set(batch["prompt_id"].tolist()) == {9}
    metrics = rollout_metrics(samples, 6, tuple(baselines.values()))
    assert metrics["reward/baseline_failures"] == 1
    assert metrics["reward/baseline_mean"] == 5.0
    assert metrics["reward/failures"] == 0
    assert metrics["reward/mean"] == pytest.approx(1.0)


def test_purpose_and_attempt_name_the_requests_and_their_random_streams() -> None:
    first, again = group_of(4), group_of(4)
    again.prompt = attrs.evolve(again.prompt, attempt=2)
    other = group_of(4)
    other.purpose = "validation"
    engine = drawn(first, again, other)
    assert [request.request_id for request in engine.requests] == [
        "train.e2.p4.a1",
        "train.e2.p4.a2",
        "validation.e2.p4.a1",
    ]
    assert len({stream.key() for r in engine.requests for stream in r.streams}) == 9


def test_a_group_that_failed_is_drawn_again_under_the_same_names() -> None:
    group, manager = group_of(4), Manager()
    script = Script(answer=answer, fails_after=(2,))
    engine = ScriptedRollout.following(script)
    scorer = Scorer(manager, timeout=5.0)

    async def twice() -> None:
        with pytest.raises(RolloutError, match="as scripted"):
            await all_of([group], RolloutPool([engine]), scorer)
        assert (group.samples, group.finished) == ([], False)
        assert len(asyncio.all_tasks()) == 1  # nothing is being scored
        await all_of([group], RolloutPool([engine]), scorer)

    asyncio.run(twice())
    assert [s.sample_id for s in group.samples] == [f"train.e2.p4.a1.s{i}" for i in range(3)]


def test_seconds_of_generation_are_those_before_the_last_response_came() -> None:
    class Waits(Manager):
        async def score(self, samples: Any, time: Any) -> list[Outcome]:
            await asyncio.sleep(0.2)
            return await super().score(samples, time)

    pool = RolloutPool([ScriptedRollout.following(Script(answer=answer))])
    generation = asyncio.run(all_of([group_of(4, n=1)], pool, Scorer(Waits(), timeout=5.0)))
    assert generation.working.seconds - generation.asking.seconds >= 0.15


def test_without_any_sample_the_columns_are_there_and_empty(make_sample) -> None:
    batch = to_batch([make_sample(0, score=None)], temperature=1.0)
    check_batch(batch)
    assert len(batch) == 0
    assert batch["epoch"].tolist() == []


def test_a_row_says_what_a_person_reads(make_sample) -> None:
    assert make_sample(3, 1, 0.5).row() == {
        "sample_id": "train.e0.p3.a0.s1",
        "prompt": "prompt 3",
        "response": "response 1",
        "score": 0.5,
        "ground_truth": None,
        "data_source": None,
        "finish_reason": "stop",
        "response_length": 3,
    }
    assert make_sample(3, score=None).row()["failure"]["message"] == "too slow"
