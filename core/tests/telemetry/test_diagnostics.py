"""Diagnostics: a warning begins after five bad steps, ends after five good ones, and a step that measures nothing says nothing."""

from __future__ import annotations

import math

import pytest

from dovetail.telemetry import Diagnostics
from dovetail.telemetry.diagnostics import CONDITIONS, STEPS

HEALTHY = {
    "advantage/zero_signal_groups": 0.6,
    "reward/std": 0.4,
    "reward/mean": 0.8,
    "reward/failure_share": 0.0,
    "reward/identical_responses": 0.84,
    "response_length/clip_ratio": 0.3,
    "actor/entropy": 0.05,
    "actor/kl": 0.2,
    "actor/approx_kl": 0.02,
}
SICK = {
    "no_signal": [{"advantage/zero_signal_groups": 1.0}, {"reward/std": 0.0}],
    "alike": [{"advantage/zero_signal_groups": 1.0}],
    "cut": [{"response_length/clip_ratio": 0.91}],
    "failures": [{"reward/failure_share": 0.2}],
    "kl": [{"actor/kl": 3.0}, {"reward/kl_penalty": -3.0}, {"actor/approx_kl": 1.0}],
    "entropy_collapsed": [{"actor/entropy": 1e-5}],
    "entropy_exploded": [{"actor/entropy": 1.6}],
}


def names(diagnostics, steps):
    return [w.name for step, metrics in steps for w in diagnostics.observe(step, metrics)]


def begun(*rows):
    """A run that begins with a healthy step, and then has these."""
    return list(enumerate([HEALTHY, *rows], start=1))


def test_every_condition_is_tried():
    assert [condition.name for condition in CONDITIONS] == list(SICK)


@pytest.mark.parametrize(("name", "sick"), [(n, s) for n, cases in SICK.items() for s in cases])
def test_it_warns_after_five_steps_in_a_row_and_once(name, sick):
    diagnostics = Diagnostics()
    assert name not in names(diagnostics, begun(*[HEALTHY | sick] * (STEPS - 1)))
    following = [(step, HEALTHY | sick) for step in range(STEPS + 1, 3 * STEPS)]
    assert names(diagnostics, following[:1]).count(name) == 1
    assert names(diagnostics, following[1:]) == []
    warning = diagnostics.in_force[name]
    assert (warning.first, warning.last) == (2, None)
    assert next(iter(sick)) in warning.message or name == "alike"


def test_healthy_steps_between_bad_ones_begin_no_warning():
    bad = HEALTHY | {"response_length/clip_ratio": 1.0}
    assert names(Diagnostics(), begun(*([bad] * (STEPS - 1) + [HEALTHY]) * 4)) == []


def test_a_warning_ends_after_five_good_steps_and_may_begin_again():
    diagnostics = Diagnostics()
    bad = [HEALTHY | {"response_length/clip_ratio": 1.0}] * STEPS
    good = [HEALTHY] * STEPS
    assert names(diagnostics, begun(*bad, *good[1:], *bad)) == ["cut"]
    diagnostics = Diagnostics()
    assert names(diagnostics, begun(*bad, *good, *bad)) == ["cut", "cut"]
    assert [(w.first, w.last) for w in diagnostics.warnings] == [(2, 6), (12, None)]


def test_steps_without_the_metrics_say_nothing():
    validation = {"val/mean@1": 0.5, "actor/entropy": None, "actor/kl": math.nan}
    bad = HEALTHY | {"actor/kl": 3.0}
    rows = [row for _ in range(STEPS) for row in (bad, validation)]
    assert names(Diagnostics(), begun(*rows)) == ["kl"]


def test_a_base_model_may_begin_with_high_entropy():
    begins_high = HEALTHY | {"actor/entropy": 5.7}
    assert names(Diagnostics(), enumerate([begins_high] * 9, start=1)) == []
