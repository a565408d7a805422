"""RunDiagnosis: a warning begins after five bad steps and ends after five good steps; steps without the metric do not count."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from dovetail_diagnosis.conditions import CONDITIONS, STEPS
from dovetail_diagnosis.diagnosis import RunDiagnosis, diagnose

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


COURSES = {
    "gamed": None,
    "collapsed": "grpo_collapse",
    "reward_fell": None,
    "overfits": "sft_overfit",
    "diverges": None,
    "chosen_falls": "dpo_falls",
}
"""Conditions of a run's course, and the real run that shows each; the others are below."""
RECORDED = Path(__file__).parent / "recorded"


def names(diagnosis, steps):
    return [w.name for step, metrics in steps for w in diagnosis.observe(step, metrics)]


def begun(*rows):
    """A run with a healthy first step, followed by these rows."""
    return list(enumerate([HEALTHY, *rows], start=1))


def test_every_condition_is_tried():
    assert {condition.name for condition in CONDITIONS} == {*SICK, *COURSES}


@pytest.mark.parametrize(("name", "sick"), [(n, s) for n, cases in SICK.items() for s in cases])
def test_it_warns_after_five_steps_in_a_row_and_once(name, sick):
    diagnosis = RunDiagnosis()
    assert name not in names(diagnosis, begun(*[HEALTHY | sick] * (STEPS - 1)))
    following = [(step, HEALTHY | sick) for step in range(STEPS + 1, 3 * STEPS)]
    assert names(diagnosis, following[:1]).count(name) == 1
    assert names(diagnosis, following[1:]) == []
    warning = diagnosis.in_force[name]
    assert (warning.first, warning.last) == (2, None)
    assert next(iter(sick)) in warning.message or name == "alike"


def test_healthy_steps_between_bad_ones_begin_no_warning():
    bad = HEALTHY | {"response_length/clip_ratio": 1.0}
    assert names(RunDiagnosis(), begun(*([bad] * (STEPS - 1) + [HEALTHY]) * 4)) == []


def test_a_warning_ends_after_five_good_steps_and_may_begin_again():
    diagnosis = RunDiagnosis()
    bad = [HEALTHY | {"response_length/clip_ratio": 1.0}] * STEPS
    good = [HEALTHY] * STEPS
    assert names(diagnosis, begun(*bad, *good[1:], *bad)) == ["cut"]
    diagnosis = RunDiagnosis()
    assert names(diagnosis, begun(*bad, *good, *bad)) == ["cut", "cut"]
    assert [(w.first, w.last) for w in diagnosis.warnings] == [(2, 6), (12, None)]


def test_steps_without_the_metrics_say_nothing():
    validation = {"val/mean@1": 0.5, "actor/entropy": None, "actor/kl": math.nan}
    bad = HEALTHY | {"actor/kl": 3.0}
    rows = [row for _ in range(STEPS) for row in (bad, validation)]
    assert names(RunDiagnosis(), begun(*rows)) == ["kl"]


def test_a_base_model_may_begin_with_high_entropy():
    begins_high = HEALTHY | {"actor/entropy": 5.7}
    assert names(RunDiagnosis(), enumerate([begins_high] * 9, start=1)) == []


def recorded(name):
    """The rows of a real run of the demo's model."""
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def test_a_collapse_is_named_with_its_cause_and_not_called_a_lack_of_signal():
    """GRPO with a learning rate 70 times too high: 23.8% of held-out sums before, none after four steps."""
    diagnosis = diagnose(recorded("grpo_collapse"))
    first = diagnosis.in_force["collapsed"]
    assert first.key == "actor.optim.lr"
    assert first.figure == "val/acc@1"
    assert first.first == 4
    assert "from 0.238 at step 0 to 0, below its start" in first.message
    assert "too large" in first.message
    assert diagnosis.in_force.keys() <= {"collapsed", "kl"}


@pytest.mark.parametrize(
    ("name", "expected", "key"),
    [
        ("sft_overfit", "overfits", "trainer.total_epochs"),
        ("dpo_falls", "chosen_falls", "actor.objective"),
    ],
)
def test_a_real_run_that_went_wrong_is_named(name, expected, key):
    [found] = diagnose(recorded(name)).warnings
    assert (found.name, found.key) == (expected, key)


def test_overfitting_names_the_step_of_the_best_model():
    [found] = diagnose(recorded("sft_overfit")).warnings
    assert "lowest at step 50" in found.message


@pytest.mark.parametrize("name", ["grpo_healthy", "sft_healthy", "dpo_healthy"])
def test_a_healthy_run_is_not_warned_of(name):
    assert diagnose(recorded(name)).warnings == []


def rewarded(rewards, **others):
    return [
        {"step": step, "reward/mean": reward, **{k: v[step - 1] for k, v in others.items()}}
        for step, reward in enumerate(rewards, start=1)
    ]


def test_a_reward_that_falls_names_the_norm_that_rose_before():
    rises = [0.2, 0.22, 0.24, 0.3, 0.33, 0.36, 0.4, 0.42]
    falls = [0.3, 0.1, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    norms = [0.5] * len(rises) + [40.0] * len(falls)
    rows = rewarded(rises + falls, **{"actor/grad_norm": norms})
    [found] = diagnose(rows).warnings
    assert (found.name, found.key) == ("reward_fell", "actor.optim.lr")
    assert "actor/grad_norm rose to 80 times" in found.message
    steady = diagnose(rewarded(rises + falls, **{"actor/grad_norm": [0.5] * len(rewards_of(rows))}))
    assert "neither gradient norm" in steady.warnings[0].message


def rewards_of(rows):
    return [row["reward/mean"] for row in rows]


def test_a_reward_that_falls_to_nothing_is_no_lack_of_signal():
    rows = rewarded([0.25, 0.24, 0.26] + [0.0] * 9)
    for row in rows[3:]:
        row["advantage/zero_signal_groups"] = 1.0
    assert [w.name for w in diagnose(rows).warnings] == ["reward_fell"]


@pytest.mark.parametrize("seed", range(8))
def test_steps_without_signal_are_usual_where_a_step_has_two_groups_of_two(seed):
    """As in a real run of the demo: eight successive steps had no reward, and validation did not change."""
    right = np.random.default_rng(seed).random((300, 2, 2)) < 0.2
    alike = (right[..., 0] == right[..., 1]).mean(axis=1).tolist()
    rows = rewarded(right.mean(axis=(1, 2)).tolist(), **{"advantage/zero_signal_groups": alike})
    assert diagnose(rows).warnings == []
    dead = [row | {"step": 301 + n, "reward/mean": 0.0, "advantage/zero_signal_groups": 1.0} for n, row in enumerate([rows[-1]] * 60)]  # fmt: skip
    [found] = diagnose([*rows, *dead]).warnings
    assert found.name in ("reward_fell", "no_signal")


@pytest.mark.parametrize("seed", range(8))
def test_the_noise_of_small_batches_is_no_fall(seed):
    draws = np.random.default_rng(seed).binomial(16, 0.1, size=600) / 16
    assert diagnose(rewarded(draws.tolist())).warnings == []


@pytest.mark.parametrize("seed", range(8))
def test_the_noise_of_small_batches_is_no_divergence(seed):
    losses = np.random.default_rng(seed).lognormal(0.0, 0.5, size=600)
    assert diagnose({"step": n, "actor/loss": loss} for n, loss in enumerate(losses)).warnings == []


def test_a_loss_that_rises_diverges_and_a_policys_does_not():
    losses = [2.0, 1.9, 1.8, 1.8, 1.9, 1.7, 1.6, 1.7, 2.5, 4.0, *[9.0] * 12]
    rows = [{"step": n, "actor/loss": loss} for n, loss in enumerate(losses, start=1)]
    [found] = diagnose(rows).warnings
    assert (found.name, found.key) == ("diverges", "actor.optim.lr")
    assert diagnose({**row, "reward/mean": 0.5} for row in rows).warnings == []


def gamed_rows(rewards, scores):
    """Rows with a reward for each step, and a validation before the first and after every tenth step, with intervals of ± 0.02."""
    rows = []
    for step in range(len(rewards) + 1):
        if step:
            rows.append({"step": step, "reward/mean": rewards[step - 1], "actor/kl": 0.1 * step})
        if step % 10 == 0:
            score = scores[step // 10]
            ends = {"val/acc@1/low": max(0.0, score - 0.02), "val/acc@1/high": score + 0.02}
            rows.append({"step": step, "val/acc@1": score, **ends})
    return rows


def test_validation_that_falls_while_the_reward_rises_is_gamed_and_not_a_learning_rate():
    rises = [0.3 + 0.02 * step + 0.01 * (step % 2) for step in range(20)]
    diagnosis = diagnose(gamed_rows(rises, [0.3, 0.35, 0.05]))
    found = diagnosis.in_force["gamed"]
    assert (found.key, found.figure, found.first) == ("reward.function", "val/acc@1", 20)
    assert "val/acc@1 fell from 0.35 at step 10 to 0.05, while reward/mean rose" in found.message
    assert "collapsed" not in diagnosis.in_force
    at_once = diagnose(gamed_rows([0.3 + 0.02 * step for step in range(10)], [0.3, 0.05]))
    assert list(at_once.in_force) == ["gamed"]


@pytest.mark.parametrize("rewards", [[0.4, 0.41] * 10, [0.6 - 0.02 * step for step in range(20)]])
def test_validation_that_falls_without_a_rise_of_the_reward_is_a_collapse(rewards):
    assert list(diagnose(gamed_rows(rewards, [0.3, 0.35, 0.05])).in_force) == ["collapsed"]


@pytest.mark.parametrize(
    ("far", "figure"),
    [
        ({"actor/approx_kl": 0.0, "actor/kl": 3.6}, "actor/kl"),
        ({"actor/approx_kl": 0.9, "actor/kl": 0.1}, "actor/approx_kl"),
        ({"actor/kl": 0.1, "reward/kl_penalty": -3.0}, "reward/kl_penalty"),
    ],
)
def test_the_kl_that_is_too_large_is_the_figure_and_the_only_one_quoted(far, figure):
    diagnosis = RunDiagnosis()
    [name] = names(diagnosis, begun(*[HEALTHY | far] * STEPS))
    found = diagnosis.in_force[name]
    assert (name, found.figure) == ("kl", figure)
    assert [metric for metric in far if metric in found.message] == [figure]


def test_a_model_that_forgets_what_it_knew_at_once_diverges_by_its_held_out_loss():
    """As in a real run of the demo, whose highest loss is among the first eight."""
    losses = [0.04, 0.9, 1.8, 3.0, 3.9, 3.5, 3.4, 2.3, 1.9, 1.6, *[1.2, 1.1, 1.3] * 6]
    rows = [{"step": n, "actor/loss": loss} for n, loss in enumerate(losses, start=1)]
    assert diagnose(rows).warnings == []
    held_out = [
        {"step": 0, "val/loss": 0.06},
        *rows[:16],
        {"step": 16, "val/loss": 1.2},
        *rows[16:],
    ]
    [found] = diagnose(held_out).warnings
    assert (found.name, found.key) == ("diverges", "actor.optim.lr")
    assert "val/loss rose from 0.06 to 1.2" in found.message
    sound = [row | {"val/loss": 0.06} if "val/loss" in row else row for row in held_out]
    assert diagnose(sound).warnings == []


def test_a_fall_within_the_intervals_of_validation_is_chance():
    rows = [
        {
            "step": step,
            "val/mean@1": value,
            "val/mean@1/low": value - 0.2,
            "val/mean@1/high": value + 0.2,
        }
        for step, value in ((0, 0.5), (10, 0.6), (20, 0.4))
    ]
    assert diagnose(rows).warnings == []


def test_damaged_rows_are_passed_over():
    rows = [
        {"step": "one"},
        {},
        {"step": None, "val/acc@1": 0.5},
        {"step": 1e300},
        {"step": 1, "actor/kl": 10**400},
    ]
    assert diagnose(rows).warnings == []


def test_every_condition_has_a_key_of_the_config_and_a_section_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text()
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert sections == [condition.name for condition in CONDITIONS]
    for condition in CONDITIONS:
        section = page.partition(f"## {condition.name}\n")[2].partition("\n## ")[0]
        assert f"`{condition.key}`" in section
        assert set(re.findall(r"`([a-z_]+/[a-z_]+)`", section)) & {*condition.figures, "val/acc"}
