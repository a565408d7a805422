"""The stages that rewrite rewards, against plain loops: DAPO's overlong penalty, and KL in the reward."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PlanFacts, PluginContext, StepContext
from dovetail.sections import AlgorithmSection, DataSection, ModelSection, PluginSection, RunConfig
from dovetail.sections.algorithm import KlInRewardSection, KlSection, OverlongPenaltySection
from dovetail.telemetry.timers import Timers
from dovetail_stages.kl_penalty import CONTROLLER, KlPenalty
from dovetail_stages.overlong_penalty import OverlongPenalty, last_policy_tokens, overlong_penalty

LIMIT = 10
OVERLONG = OverlongPenaltySection(buffer=4, factor=0.5)


def make_batch(masks: list[list[bool]], seed: int = 0) -> Batch:
    """Random rewards, scores and log-probabilities over these response masks."""
    rng = np.random.default_rng(seed)
    mask = Ragged.from_list(masks, dtype=np.bool_)
    rewards = mask.with_values(rng.normal(size=len(mask.values)).astype(np.float32))

    def log_probs() -> Ragged:
        values = np.where(mask.values, -rng.exponential(size=len(mask.values)), np.nan)
        return mask.with_values(values.astype(np.float32))

    return Batch(
        {
            "response_mask": mask,
            "token_rewards": rewards,
            "scores": rewards.sum().astype(np.float32),
            "old_log_probs": log_probs(),
            "ref_log_probs": log_probs(),
        }
    )


masks = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=6)


class Shaped(SimpleNamespace):
    """The result of a config's stages on a batch.

    Attributes:
        batch: the batch after the last stage.
        metrics: the metrics of the step.
        stages: the names of the stages that ran.
    """


def shaped(batch: Batch, overlong=None, kl=None, factor: float = 1.0) -> Shaped:
    algorithm = AlgorithmSection(overlong_penalty=overlong, kl=KlSection(in_reward=kl))
    config = RunConfig(
        model=ModelSection(path="nowhere"),
        data=DataSection(max_response_length=LIMIT),
        algorithm=algorithm,
    )
    fixed = SimpleNamespace(ref=SimpleNamespace(name="fixed"))
    step = StepContext(
        number=1,
        facts=PlanFacts(config=config, plugins={CONTROLLER: fixed}, updates_per_step=1),
        roles={},
        plugins={CONTROLLER: SimpleNamespace(value=factor)},
        logger=logging.getLogger(__name__),
        timer=Timers(),
    )
    stages = []
    for cls in (OverlongPenalty, KlPenalty):
        section = PluginSection(name=cls.name)
        if cls.because(section, step.facts):
            batch = cls(section, PluginContext()).run(batch, step)
            stages.append(cls.name)
    return Shaped(batch=batch, metrics=step.metrics, stages=stages)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (6, 0), (7, -0.125), (8, -0.25), (10, -0.5), (13, -0.5)]
)
def test_the_penalty_of_equation_13(length, penalty):
    found = overlong_penalty(np.array([length]), LIMIT, OVERLONG)
    assert found.tolist() == [penalty]
    assert not np.signbit(found[0]) or penalty


@given(masks)
def test_rewards_of_samples_sit_on_the_last_token_of_the_policy(rows):
    samples, places = last_policy_tokens(Ragged.from_list(rows, dtype=np.bool_))
    expected, start = {}, 0
    for i, row in enumerate(rows):
        for t, counts in enumerate(row):
            if counts:
                expected[i] = start + t
        start += len(row)
    assert dict(zip(samples.tolist(), places.tolist(), strict=True)) == expected


@given(masks)
def test_the_overlong_penalty_as_a_loop(rows):
    batch = make_batch(rows)
    done = shaped(batch, overlong=OVERLONG)
    rewards, scores, penalties = [], [], []
    for i, row in enumerate(rows):
        length = sum(row)
        penalty = 0.0
        if length > LIMIT - OVERLONG.buffer:
            over = (length - (LIMIT - OVERLONG.buffer)) / OVERLONG.buffer
            penalty = -min(over, 1.0) * OVERLONG.factor
        tokens = batch["token_rewards"][i].astype(float).tolist()
        for t in reversed(range(len(row))):
            if row[t]:
                tokens[t] += penalty
                break
        rewards += tokens
        scores.append(batch["scores"][i] + penalty)
        penalties.append(penalty)
    np.testing.assert_allclose(done.batch["token_rewards"].values, rewards, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(done.batch["scores"], scores, rtol=1e-6, atol=1e-7)
    assert done.metrics["reward/overlong_penalty"] == pytest.approx(np.mean(penalties))
    assert done.metrics["reward/overlong_share"] == np.mean([p < 0 for p in penalties])
    assert done.stages == ["overlong_penalty"]


def kl_oracle(estimator: str, d: float) -> float:
    if estimator == "k1":
        return d
    if estimator == "abs":
        return abs(d)
    if estimator == "k2":
        return d * d / 2
    return min(math.exp(-d) + d - 1, 10.0)


@given(masks, st.sampled_from(["k1", "abs", "k2", "k3"]), st.floats(0.01, 2), st.floats(0.1, 3))
def test_kl_in_the_reward_as_a_loop(rows, estimator, coef, factor):
    """Masked-out values are NaN in this test, and have no influence."""
    batch = make_batch(rows)
    done = shaped(batch, kl=KlInRewardSection(estimator=estimator, coef=coef), factor=factor)
    total, tokens = 0.0, 0
    for i, row in enumerate(rows):
        taken = 0.0
        for t, counts in enumerate(row):
            penalty = 0.0
            if counts:
                d = float(batch["old_log_probs"][i][t]) - float(batch["ref_log_probs"][i][t])
                kl = kl_oracle(estimator, d)
                total, tokens, penalty = total + kl, tokens + 1, coef * factor * kl
            expected = batch["token_rewards"][i][t] - penalty
            assert done.batch["token_rewards"][i][t] == pytest.approx(expected, rel=1e-4, abs=1e-4)
            taken += penalty
        assert done.batch["scores"][i] == pytest.approx(
            batch["scores"][i] - taken, rel=1e-4, abs=1e-3
        )
    mean = total / tokens if tokens else 0.0
    assert done.metrics["reward/kl_penalty"] == pytest.approx(mean, rel=1e-4, abs=1e-5)
    assert done.metrics["reward/kl_coef"] == pytest.approx(coef * factor)


@given(masks)
def test_scores_are_the_sums_of_the_token_rewards(rows):
    batch = make_batch([[*row, True] for row in rows])
    done = shaped(batch, overlong=OVERLONG, kl=KlInRewardSection(coef=0.5)).batch
    np.testing.assert_allclose(done["scores"], done["token_rewards"].sum(), rtol=1e-4, atol=1e-5)
    assert done["scores"].dtype == done["token_rewards"].dtype == np.float32


def test_a_sample_without_a_token_of_the_policy_keeps_its_score():
    batch = make_batch([[], [False, False], [True]])
    batch = batch.with_columns({"scores": np.array([1.0, 2.0, 3.0], np.float32)})
    done = shaped(batch, kl=KlInRewardSection(coef=1.0))
    assert done.batch["scores"].tolist()[:2] == [1.0, 2.0]
    assert done.batch["scores"][2] != 3.0


def test_nothing_asked_for_changes_nothing():
    batch = make_batch([[True, False], [True]])
    done = shaped(batch)
    assert done.stages == []
    assert done.batch is batch
    assert done.metrics == {}


def test_a_penalty_without_weight_is_no_stage():
    done = shaped(make_batch([[True]]), kl=KlInRewardSection(coef=0.0))
    assert done.stages == []
