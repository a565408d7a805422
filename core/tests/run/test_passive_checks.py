"""Passive checks: the first step refuses what is not as its interface says, by the plugin's name and version."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Completion, FinishReason
from dovetail.metrics import EffectiveShare, Last, Max, Mean, Min, Std, Sum, values
from dovetail.numerics import resolve_metrics, weight_metrics
from dovetail.run.passive_checks import PassiveChecks
from dovetail.sections import PluginSection

ROLLOUT = PluginSection(name="hf")
ENGINE = PluginSection(name="fsdp2")
GOOD = Completion(
    request_id="r",
    sample=0,
    response_ids=np.array([5, 6, 7]),
    finish_reason=FinishReason.STOP,
    weight_versions=np.array([1, 1, 2]),
    log_probs=np.array([-1.0, -0.5, 0.0], np.float32),
)


def check(completion: Completion, step: int = 1, checks: PassiveChecks | None = None) -> None:
    sample = SimpleNamespace(sample_id="s7", completion=completion)
    (checks or PassiveChecks()).rollout(step, [sample], ROLLOUT, 3)


def test_a_sound_completion_passes():
    check(GOOD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"response_ids": [5, 6, 7]}, "response_ids is list, not int64 [T]"),
        ({"response_ids": np.array([5, 6, 7], np.int32)}, "response_ids is int32 [3]"),
        ({"response_ids": np.arange(4)}, "it has 4 tokens, and at most 3"),
        ({"weight_versions": np.array([1, 1])}, "weight_versions is int64 [2], not int64 [3]"),
        ({"weight_versions": np.ones(3)}, "weight_versions is float64 [3]"),
        ({"log_probs": np.zeros(3)}, "log_probs is float64 [3], not float32 [3]"),
        ({"log_probs": np.zeros(2, np.float32)}, "log_probs is float32 [2], not float32 [3]"),
        ({"log_probs": np.array([0, 0.5, 0], np.float32)}, "log_probs holds 0.5"),
    ],
)
def test_what_a_rollout_got_wrong_is_named_with_plugin_version_and_sample(change, words):
    with pytest.raises(PluginBrokenError) as caught:
        check(attrs.evolve(GOOD, **change))
    assert words in str(caught.value)
    assert "rollout/hf (dovetail-rollout-hf " in str(caught.value)
    assert "sample 's7'" in str(caught.value)


MASK = Ragged.from_list([np.array([True, False]), np.array([True])], dtype=np.bool_)
BATCH = Batch({"response_mask": MASK})


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "returned no column 'log_probs'"),
        ({"log_probs": MASK.with_values(np.zeros(3))}, "as float64, not float32"),
        ({"log_probs": MASK.with_values(np.full(3, -1, np.float32))}, "on 1 masked tokens"),
        ({"log_probs": Ragged.from_list([[0.0], [0.0]], dtype=np.float32)}, "for 2 tokens"),
    ],
)
def test_what_an_engine_got_wrong_is_named(columns, words):
    found = Batch(columns, length=2)
    with pytest.raises(PluginBrokenError, match="engine/fsdp2") as caught:
        PassiveChecks().scored(1, BATCH, found, ["log_probs"], ENGINE)
    assert words in str(caught.value)


def test_sound_columns_pass():
    column = MASK.with_values(np.array([-1, 0, -2], np.float32))
    PassiveChecks().scored(1, BATCH, Batch({"log_probs": column}), ["log_probs"], ENGINE)


def test_after_the_first_step_of_a_sitting_nothing_is_looked_at():
    checks = PassiveChecks()
    check(GOOD, step=5, checks=checks)
    wrong = attrs.evolve(GOOD, response_ids=np.arange(4))
    check(wrong, step=6, checks=checks)
    with pytest.raises(PluginBrokenError):
        check(wrong, step=5, checks=checks)


def test_metrics_over_nothing_pass_and_give_no_figure():
    nothing_T = torch.zeros(3, dtype=torch.bool)
    ones_T = torch.ones(3)
    metrics = resolve_metrics([weight_metrics(ones_T, ones_T, nothing_T, lower=None, upper=2.0)])
    assert {Min(np.inf), Max(-np.inf), EffectiveShare(0, 0, 0)} <= set(metrics.values())
    PassiveChecks().updated(1, metrics, "actor", ENGINE)
    assert values(metrics) == {}


@pytest.mark.parametrize(
    "metric",
    [
        Mean(np.inf, 2.0),
        Mean(np.nan, 2.0),
        Sum(np.nan),
        Last(np.nan),
        Max(np.inf),
        Max(np.nan),
        Min(-np.inf),
        Std(2.0, 0.0, np.inf),
        EffectiveShare(1.0, np.nan, 2.0),
    ],
)
def test_a_metric_that_is_not_finite_is_refused_and_stays_a_figure(metric):
    with pytest.raises(PluginBrokenError, match=r"'actor/x' with the value -?(inf|nan)"):
        PassiveChecks().updated(1, {"actor/x": metric}, "actor", ENGINE)
    assert "x" in values({"x": metric})
