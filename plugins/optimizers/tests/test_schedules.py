"""The learning rate: warm-up, then a schedule down to its floor."""

import math

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail.plugins import plugin_section
from dovetail_torch_engines import LearningRate


def rates(steps, total, **settings):
    """Return the learning rates of the first steps."""
    rate = LearningRate(plugin_section("optimizer", "adamw", **settings), total)
    return [rate(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55,
                    0.1 + 0.9 * (1 + math.cos(3 * math.pi / 4)) / 2, 0.1]),
        (plugin_section("schedule", "wsd", decay_share=0.5), [0.5, 1.0, 1.0, 1.0, 0.55, 0.1]),
        (plugin_section("schedule", "wsd", decay_share=0.5, decay="sqrt"), [0.5, 1.0, 1.0, 1.0, 0.1 + 0.9 * (1 - math.sqrt(0.5)), 0.1]),
        (plugin_section("schedule", "wsd", decay_share=1.0, decay="cosine"), [0.5, 1.0, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55,
                    0.1 + 0.9 * (1 + math.cos(3 * math.pi / 4)) / 2, 0.1]),
    ],
)  # fmt: skip
def test_after_warm_up_the_rate_follows_the_schedule_to_its_floor(schedule, expected):
    found = rates(101, 6, lr=1.0, schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    np.testing.assert_allclose(found[:6], expected)
    assert found[100] == pytest.approx(expected[-1])


def test_without_warm_up_the_first_step_has_the_peak_and_the_last_the_minimum():
    assert rates(3, 3, lr=2.0, schedule="linear") == [2.0, 1.0, 0.0]


def test_a_run_of_one_step_has_the_peak():
    assert rates(1, 1, lr=2.0, schedule="cosine") == [2.0]


def test_a_group_with_a_peak_of_its_own_follows_the_same_schedule():
    section = plugin_section("optimizer", "muon", lr=1.0, schedule="cosine", warmup_steps=3)
    rate = LearningRate(section, 9)
    np.testing.assert_allclose([rate(i, 0.01) for i in range(9)], [rate(i) / 100 for i in range(9)])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_falling_schedule_must_know_its_end(schedule):
    with pytest.raises(ConfigError, match="number of steps"):
        rates(1, None, schedule=schedule)
    assert rates(2, None, lr=3.0) == [3.0, 3.0]
