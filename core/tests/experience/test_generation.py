"""From prompts to scored samples and to columns: what is asked of the engine, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dovetail.batch.columns import check_batch
from dovetail.data.loader import Issued
from dovetail.experience.generation import Generated, generate_and_score
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.experience.sample_columns import rollout_metrics, to_batch
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
from dovetail.scoring.scorer import Scorer
from dovetail.sections import PluginSection
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout

SAMPLING = SamplingParams(
    max_new_tokens=6, temperature=0.7, top_p=0.9, top_k=5, stop=("END",), log_probs=True
)


class Tokenizer:
    """Text is the token ids."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


class Manager(RewardManager):
    """Scores the number of tokens; a prompt named in `refused` can't be scored when it is greedy."""

    name = "lengths"
    api = ">=1.0,<2"

    def __init__(self, unit: str = "sample", refused: str | None = None) -> None:
        super().__init__(PluginSection(name="lengths"), PluginContext())
        self.unit = unit
        self.refused = refused
        self.seen: list[list[str]] = []

    async def score(self, unit: Any) -> list[Outcome]:
        self.seen.append([sample.sample_id for sample in unit.samples])
        return [
            Failure(kind=FailureKind.EXCEPTION, message="no")
            if sample.sample_id.startswith("baseline") and sample.prompt == self.refused
            else Score(value=float(len(sample.response_ids)))
            for sample in unit.samples
        ]


def answer(request: RolloutRequest, sample: int) -> list[int]:
    """Sample i of a prompt has i tokens, so that the first is empty; a greedy one has 5."""
    return [7] * (5 if request.sampling.temperature == 0 else sample)


def issued(*prompts: int) -> list[Issued]:
    return [
        Issued(epoch=2, attempt=1, prompt=Prompt(index=i, prompt_ids=np.arange(3), raw=f"q{i}"))
        for i in prompts
    ]


def generate(
    prompts: list[Issued], manager: Manager | None = None, n: int = 3, **options: Any
) -> tuple[Generated, ScriptedRollout]:
    engine = ScriptedRollout.following(Script(answer=answer))
    done = asyncio.run(
        generate_and_score(
            prompts,
            n=n,
            sampling=SAMPLING,
            pool=RolloutPool([engine]),
            scorer=Scorer(manager or Manager(), timeout=5.0),
            tokenizer=Tokenizer(),
            seed=1,
            **options,
        )
    )
    return done, engine


def test_samples_come_in_the_order_of_prompts_whatever_finishes_first() -> None:
    done, _ = generate(issued(4, 9))
    assert [s.sample_id for s in done.samples] == [
        f"train.e2.p{prompt}.a1.s{i}" for prompt in (4, 9) for i in range(3)
    ]
    assert [s.score for s in done.samples] == [0, 1, 2] * 2
    assert [s.key for s in done.samples] == [(2, 4, 1)] * 3 + [(2, 9, 1)] * 3
    assert done.baselines == ()


def test_groups_number_on_from_the_rounds_before() -> None:
    done, _ = generate(issued(4, 9), first_group=5, baseline=True)
    assert [s.group for s in done.samples] == [5] * 3 + [6] * 3
    assert [s.group for s in done.baselines] == [5, 6]


def test_a_baseline_is_one_greedy_request_a_prompt_with_a_stream_of_its_own() -> None:
    done, engine = generate(issued(4), baseline=True)
    sampled, greedy = engine.requests
    assert [s.text for s in done.baselines] == ["7 7 7 7 7"]
    assert [s.score for s in done.baselines] == [5.0]
    assert greedy.n == 1
    assert greedy.sampling == SamplingParams(max_new_tokens=6, temperature=0.0, stop=("END",))
    assert greedy.streams[0].purpose == "baseline"
    assert greedy.streams[0].key() not in {stream.key() for stream in sampled.streams}
    assert sampled.sampling == SAMPLING


def test_what_is_sampled_does_not_depend_on_whether_there_is_a_baseline() -> None:
    _, without = generate(issued(4, 9))
    _, with_one = generate(issued(4, 9), baseline=True)
    assert [r.streams for r in without.requests] == [r.streams for r in with_one.requests[:2]]


def test_a_manager_of_groups_sees_a_baseline_apart_from_its_prompts_samples() -> None:
    manager = Manager(unit="group")
    done, _ = generate(issued(4), manager, baseline=True)
    assert sorted(map(len, manager.seen)) == [1, 3]
    assert [s.score for s in done.baselines] == [5.0]


def test_columns_are_as_the_glossary_says_even_for_an_empty_response() -> None:
    done, _ = generate(issued(4, 9), baseline=True)
    batch = to_batch(done.samples, temperature=0.7, baselines={s.group: s for s in done.baselines})
    check_batch(batch)
    assert batch["response_ids"].lengths.tolist() == [0, 1, 2] * 2
    assert batch["token_rewards"].to_list() == [[], [1.0], [0.0, 2.0]] * 2
    assert batch["scores"].tolist() == [0, 1, 2] * 2
    assert batch["baseline_scores"].tolist() == [5.0] * 6
    assert batch["trajectory_id"].tolist() == list(range(6))
    assert batch["rollout_log_probs"].lengths.tolist() == [0, 1, 2] * 2


def test_a_prompt_whose_baseline_has_no_score_leaves_the_batch_and_is_counted() -> None:
    done, _ = generate(issued(4, 9), Manager(refused="q4"), baseline=True)
    batch = to_batch(done.samples, temperature=0.7, baselines={s.group: s for s in done.baselines})
    assert set(batch["prompt_id"].tolist()) == {9}
    metrics = rollout_metrics(done.samples, 6, done.baselines)
    assert metrics["reward/baseline_failures"] == 1
    assert metrics["reward/baseline_mean"] == 5.0
    assert metrics["reward/failures"] == 0
    assert metrics["reward/mean"] == pytest.approx(1.0)


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
