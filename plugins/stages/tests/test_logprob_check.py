"""The log-probability check: healthy runs pass, also with truncated sampling, and each injected fault is named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.errors import ColumnError, NumericsError
from dovetail.interfaces import SamplingParams
from dovetail.metrics import values
from dovetail.sections.algorithm import LogProbCheckSection
from dovetail_stages.logprob_check import chosen_rows, due, measure, stale_rows

VOCABULARY = 60
SECTION = LogProbCheckSection()


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def truncate(log_probs, top_p=1.0, top_k=-1):
    """The log-probabilities after top-k, then top-p, renormalised."""
    order = np.argsort(-log_probs, -1)
    ranked = np.take_along_axis(log_probs, order, -1)
    if top_k > 0:
        ranked[:, top_k:] = -np.inf
        ranked = log_softmax(ranked)
    before = np.cumsum(np.exp(ranked), -1) - np.exp(ranked)
    kept = np.empty_like(ranked)
    np.put_along_axis(kept, order, np.where(before < top_p, ranked, -np.inf), -1)
    return log_softmax(kept)


class World:
    """Contexts of a synthetic model, from near-certain to almost uniform, and a sampler that draws tokens in these contexts."""

    def __init__(self, seed=0, lengths=(200, 0, 300, 1, 299, 400)):
        self.rng = np.random.default_rng(seed)
        self.offsets = np.cumsum([0, *lengths])
        count = self.offsets[-1]
        self.logits = self.rng.gumbel(size=(count, VOCABULARY)) * np.exp(
            self.rng.normal(0.9, 0.7, size=(count, 1))
        )
        self.mask = self.rng.random(count) < 0.9

    def ragged(self, values_T, dtype=np.float32):
        return Ragged(np.where(self.mask, values_T, 0).astype(dtype), self.offsets)

    def measure(
        self,
        *,
        engine=None,
        sampler=None,
        raw=False,
        versions=None,
        sampling=None,
        section=SECTION,
        version=7,
        trainer_temperature=None,
        edit=lambda rollout_T: rollout_T,
    ):
        """Draw from `sampler(engine's log-probabilities)`, and run the check on the samples."""
        sampling = sampling or SamplingParams(max_new_tokens=512)
        engine_TV = log_softmax(self.logits if engine is None else engine)
        sampler_TV = engine_TV if sampler is None else sampler(engine_TV)
        drawn = np.argmax(sampler_TV + self.rng.gumbel(size=sampler_TV.shape), -1)[:, None]

        def of_drawn(log_probs_TV):
            return np.take_along_axis(log_probs_TV, drawn, -1)[:, 0]

        count = len(self.logits)
        columns = {
            "sample_id": [f"s{i}" for i in range(len(self.offsets) - 1)],
            "response_mask": Ragged(self.mask, self.offsets),
            "rollout_log_probs": self.ragged(edit(of_drawn(sampler_TV))),
            "token_weight_versions": Ragged(
                np.full(count, 7) if versions is None else versions, self.offsets
            ),
            "temperature": np.full(
                len(self.offsets) - 1,
                sampling.temperature if trainer_temperature is None else trainer_temperature,
                np.float32,
            ),
        }
        if raw:
            columns["raw_rollout_log_probs"] = self.ragged(of_drawn(engine_TV))
        return measure(
            Batch(columns),
            self.ragged(of_drawn(log_softmax(self.logits))),
            sampling=sampling,
            section=section,
            weight_version=version,
        )

    def noisy(self, size):
        """The logits of the same weights, computed with lower precision."""
        return self.logits + self.rng.normal(size=self.logits.shape) * size


@pytest.fixture
def world():
    return World()


def top(**how):
    return SamplingParams(max_new_tokens=512, **how)


# -- healthy runs ----------------------------------------------------------------------------------


def test_equal_policies_pass(world):
    verdict = world.measure()
    assert (verdict.level, verdict.cause, verdict.message) == ("ok", None, "")
    got = values(verdict.metrics)
    assert got["logprob_check/prob_diff_mean"] == pytest.approx(0, abs=1e-6)
    assert got["logprob_check/correlation"] == pytest.approx(1)
    assert got["logprob_check/tokens"] == world.mask.sum()
    assert got["logprob_check/stale_tokens"] == 0
    verdict.check()


def test_the_noise_of_kernels_passes(world):
    verdict = world.measure(engine=world.noisy(0.03))
    assert verdict.level == "ok"
    assert 0.001 < values(verdict.metrics)["logprob_check/prob_diff_mean"] < 0.01


@pytest.mark.parametrize(
    "how", [{"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 5}, {"top_k": 20, "top_p": 0.8}]
)
@pytest.mark.parametrize("raw", [False, True])
def test_truncation_that_the_config_asks_for_stops_no_healthy_run(world, how, raw):
    section = LogProbCheckSection(stop_above=0.02)
    verdict = world.measure(
        engine=world.noisy(0.03),
        sampler=lambda log_probs: truncate(log_probs, **how),
        sampling=top(**how),
        raw=raw,
        section=section,
    )
    got = values(verdict.metrics)
    assert got["logprob_check/prob_diff_mean"] > section.stop_above, (
        "else there is nothing to allow for"
    )
    assert got["logprob_check/unexplained_diff_mean"] < 0.01
    assert (verdict.level, verdict.cause) == ("ok", "sampling_transform")
    assert "top_p" in verdict.message
    verdict.check()


def test_figures_equal_their_definitions():
    mask = Ragged.from_list([[True, False, True], [True]], dtype=np.bool_)
    rollout = mask.with_values(np.log(np.array([0.5, 0.9, 0.2, 0.8], np.float32)))
    train = mask.with_values(np.log(np.array([0.4, 0.1, 0.3, 0.8], np.float32)))
    batch = Batch({"response_mask": mask, "rollout_log_probs": rollout})
    verdict = measure(batch, train, sampling=top(), section=SECTION)
    p, q = np.array([0.4, 0.3, 0.8]), np.array([0.5, 0.2, 0.8])
    assert values(verdict.metrics) == pytest.approx(
        {
            "logprob_check/prob_diff_mean": np.abs(p - q).mean(),
            "logprob_check/prob_diff_max": np.abs(p - q).max(),
            "logprob_check/log_prob_diff_mean": np.log(q / p).mean(),
            "logprob_check/correlation": np.corrcoef(p, q)[0, 1],
            "logprob_check/tokens": 3,
        }
    )


@pytest.mark.parametrize("rows", [[], [[]], [[False, False]]])
def test_a_batch_without_tokens_passes(rows):
    mask = Ragged.from_list(rows, dtype=np.bool_)
    column = mask.with_values(np.full(len(mask.values), np.nan, np.float32))
    batch = Batch({"response_mask": mask, "rollout_log_probs": column})
    verdict = measure(batch, column, sampling=top(), section=SECTION, weight_version=1)
    assert verdict.level == "ok"


# -- faults ----------------------------------------------------------------------------------------


def test_stale_weights_are_named_with_their_versions(world):
    versions = np.full(len(world.logits), 7)
    stale = world.logits.copy()
    stale[600:] += world.rng.normal(size=stale[600:].shape) * 2
    versions[600:900], versions[900:] = 6, 5
    verdict = world.measure(engine=stale, versions=versions)
    assert verdict.cause == "weights_version"
    assert verdict.level in ("warn", "stop")
    in_5, in_6 = world.mask[900:].sum(), world.mask[600:900].sum()
    assert f"5 ({in_5:,} tokens), 6 ({in_6:,} tokens)" in verdict.message
    assert "version 7 is the current one" in verdict.message
    assert set(verdict.sample_ids[:2]) == {"s4", "s5"}
    assert values(verdict.metrics)["logprob_check/stale_tokens"] == in_5 + in_6


def test_stale_weights_are_warned_of_even_where_they_hardly_differ(world):
    versions = np.full(len(world.logits), 7)
    versions[:10] = 6
    assert world.measure(versions=versions).level == "warn"
    assert world.measure(versions=versions).cause == "weights_version"
    assert world.measure(versions=versions, version=None).level == "ok"


def test_stale_tokens_do_not_hide_another_fault(world):
    versions = np.full(len(world.logits), 7)
    versions[:50] = 6
    verdict = world.measure(engine=world.noisy(0.5), versions=versions)
    assert verdict.cause == "numerics"
    assert "version 6" in verdict.message


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.3, 1.6])
def test_another_temperature_is_named(world, temperature):
    verdict = world.measure(engine=world.logits / temperature)
    assert (verdict.level != "ok", verdict.cause) == (True, "sampling_transform")
    assert ("sharper" if temperature < 1 else "flatter") in verdict.message


def test_a_temperature_that_the_trainer_does_not_divide_by_is_named(world):
    verdict = world.measure(
        engine=world.logits / 0.7, sampling=top(temperature=0.7), trainer_temperature=1.0
    )
    assert verdict.cause == "sampling_transform"
    assert "temperature 0.7" in verdict.message
    assert "divides logits by 1" in verdict.message


@pytest.mark.parametrize("how", [{"top_p": 0.8}, {"top_k": 3}])
def test_truncation_that_the_config_does_not_name_is_named(world, how):
    def sampler(log_probs):
        return truncate(log_probs, **how)

    blind, seeing = world.measure(sampler=sampler), world.measure(sampler=sampler, raw=True)
    for verdict in (blind, seeing):
        assert (verdict.level != "ok", verdict.cause) == (True, "sampling_transform")
        assert "generation_config" in verdict.hint
    assert "higher" in blind.message
    assert "before sampling agree" in seeing.message


def test_more_truncation_than_top_p_is_named(world):
    verdict = world.measure(
        sampler=lambda log_probs: truncate(log_probs, top_p=0.95, top_k=2),
        sampling=top(top_p=0.95),
    )
    assert (verdict.level != "ok", verdict.cause) == (True, "sampling_transform")
    assert "than top_p = 0.95" in verdict.message


def test_a_wrong_log_prob_of_the_last_token_is_named():
    world = World(lengths=(12,) * 100)
    world.mask[:] = True
    ends = world.offsets[1:] - 1

    def edit(rollout_T):
        rollout_T[ends] = 0.0
        return rollout_T

    verdict = world.measure(edit=edit, engine=world.noisy(0.01))
    assert (verdict.level != "ok", verdict.cause) == (True, "sampling_transform")
    assert "last tokens" in verdict.message


@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("raw", [False, True])
def test_what_leaves_no_mark_is_numerics(world, size, raw):
    verdict = world.measure(engine=world.noisy(size), raw=raw)
    assert (verdict.level != "ok", verdict.cause) == (True, "numerics")
    assert "0.005" in verdict.message
    assert "dtypes" in verdict.hint


@pytest.mark.parametrize("raw", [False, True])
def test_numerics_is_seen_through_truncation(world, raw):
    verdict = world.measure(
        engine=world.noisy(1.0),
        sampler=lambda log_probs: truncate(log_probs, top_p=0.95),
        sampling=top(top_p=0.95),
        raw=raw,
    )
    assert (verdict.level != "ok", verdict.cause) == (True, "numerics")


def test_log_probs_that_are_not_finite_stop(world):
    def edit(rollout_T):
        rollout_T[np.flatnonzero(world.mask)[3]] = -np.inf
        return rollout_T

    verdict = world.measure(edit=edit)
    assert (verdict.level, verdict.cause) == ("stop", "numerics")
    assert "1 log-prob" in verdict.message
    assert verdict.sample_ids[0] == "s0"
    assert all(math.isfinite(x) for x in values(verdict.metrics).values())


# -- levels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warn", "stop", "level"),
    [
        (0.5, 0.9, "ok"),
        (0.001, 0.9, "warn"),
        (0.001, 0.01, "stop"),
        (0.001, None, "warn"),
        (0.9, 0.01, "stop"),
    ],
)
def test_the_level_follows_the_bounds(world, warn, stop, level):
    section = LogProbCheckSection(warn_above=warn, stop_above=stop)
    verdict = world.measure(engine=world.noisy(0.5), section=section)
    assert verdict.level == level
    if level == "stop":
        with pytest.raises(
            NumericsError, match=r"algorithm\.logprob_check\.stop_above = 0\.01"
        ) as error:
            verdict.check()
        assert error.value.hint
        assert error.value.sample_ids
    else:
        verdict.check()


@pytest.mark.parametrize(
    "column", ["rollout_log_probs", "raw_rollout_log_probs", "token_weight_versions"]
)
def test_columns_that_do_not_line_up_are_refused(column):
    mask = Ragged.from_list([[True, True]], dtype=np.bool_)
    good = mask.with_values(np.zeros(2, np.float32))
    short = Ragged.from_list([[0.0]], dtype=np.float32)
    batch = Batch({"response_mask": mask, "rollout_log_probs": good} | {column: short})
    with pytest.raises(ColumnError, match=column):
        measure(batch, good, sampling=top(), section=SECTION)


# -- when, and on what -----------------------------------------------------------------------------


def test_it_is_due_at_the_first_step_and_every_so_many():
    assert [step for step in range(1, 31) if due(step, LogProbCheckSection(every=10))] == [
        1,
        10,
        20,
        30,
    ]
    assert not any(due(step, LogProbCheckSection(every=0)) for step in range(1, 31))


def test_rows_are_spread_evenly_and_have_tokens():
    lengths = [0, 3, 2, 0, 1, 4, 5, 2, 1, 1]
    mask = Ragged.from_list([[True] * n for n in lengths], dtype=np.bool_)
    assert chosen_rows(mask, 4).tolist() == [1, 4, 6, 8]
    assert chosen_rows(mask, 100).tolist() == [1, 2, 4, 5, 6, 7, 8, 9]
    assert chosen_rows(mask.slice(0, 1), 3).tolist() == []


def test_tokens_that_the_policy_did_not_produce_have_no_age() -> None:
    versions = Ragged.from_list([[5, -1, 5], [4, -1, 4], [-1, 2], [5, 5]], dtype=np.int64)
    batch = Batch({"token_weight_versions": versions})
    assert stale_rows(batch, 5, 1).tolist() == [False, True, False, False]
