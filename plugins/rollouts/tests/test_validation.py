"""Metrics of validation, for each data source and over all; samples without a score never count as numbers."""

from __future__ import annotations

import time

import attrs
import numpy as np
import pytest

from dovetail.interfaces import Failure, FailureKind, Score
from dovetail_rollouts import outcome_from, validation_metrics
from dovetail_rollouts.validation import main_metric, metric_names
from dovetail_sdk.testing import make_sample

FAILED = Failure(kind=FailureKind.TIMEOUT, message="too slow")


def sample(prompt, outcome, source=None, length=5):
    """One validation sample."""
    if isinstance(outcome, float):
        outcome = Score(value=outcome)
    made = make_sample(
        "s", response_ids=np.zeros(length, np.int64), index=prompt, data_source=source
    )
    return attrs.evolve(made, outcome=outcome)


def answered(prompt, score, answer, source=None):
    return sample(prompt, Score(value=score, extras={"pred": answer}), source)


def means(metrics):
    return {
        name.removeprefix("val/"): value
        for name, value in metrics.items()
        if not name.endswith(("/low", "/high"))
    }


def test_one_greedy_sample_a_prompt_gives_its_mean_and_an_interval():
    metrics = validation_metrics([sample(i, float(i < 30)) for i in range(40)], 1)
    assert metrics["val/mean@1"] == metrics["val/pass@1"] == metrics["val/best@1"] == 0.75
    assert 0.55 < metrics["val/mean@1/low"] < 0.70 < 0.80 < metrics["val/mean@1/high"] < 0.92
    assert metrics["val/failures"] == 0
    assert metrics["val/response_length/mean"] == 5
    assert not any("majority" in name for name in metrics)


def test_figures_of_several_samples_are_the_ones_of_the_papers():
    rows = {0: (1.0, 0.0, 0.0, 0.0), 1: (0.0, 0.0, 0.0, 0.0), 2: (1.0, 1.0, 1.0, 0.0)}
    found = means(validation_metrics([sample(p, s) for p, row in rows.items() for s in row], 4))
    assert found["mean@4"] == pytest.approx(4 / 12)
    assert found["pass@1"] == pytest.approx(4 / 12)
    assert found["pass@2"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert found["pass@4"] == found["best@4"] == pytest.approx(2 / 3)
    assert found["best@2"] == pytest.approx((1 / 2 + 0 + 1) / 3)


def test_every_source_has_figures_of_its_own_and_all_prompts_count_the_same_over_all():
    samples = [sample(i, 1.0, "a") for i in range(3)] + [sample(9, 0.0, "b/c")]
    found = means(validation_metrics(samples, 1))
    assert (found["a/mean@1"], found["b/c/mean@1"], found["mean@1"]) == (1.0, 0.0, 0.75)


def test_the_majority_answer_counts_and_ties_are_shared():
    votes = [("4", 1.0), ("4", 1.0), ("5", 0.0), (None, 0.0)]
    tied = [("4", 1.0), ("5", 0.0), ("4", 1.0), ("5", 0.0)]
    samples = [
        answered(prompt, score, answer)
        for prompt, row in enumerate((votes, tied))
        for answer, score in row
    ]
    found = means(validation_metrics(samples, 4))
    assert found["majority@4"] == pytest.approx((1.0 + 0.5) / 2)
    assert found["majority@1"] == found["mean@4"] == 0.5


def test_answers_are_equal_however_a_number_is_written():
    row = [(4, 1.0), ("4.0", 1.0), (" 4 ", 1.0), ("5", 0.0), ("6", 0.0), ("x", 0.0), ("", 0.0)]
    found = means(validation_metrics([answered(0, s, a) for a, s in row], 7))
    assert found["majority@7"] == 1.0
    long = [("12345678901234567890", 1.0), ("12345678901234567891", 0.0), ("nan", 0.0)]
    found = means(validation_metrics([answered(0, s, a) for a, s in long], 3))
    assert found["majority@3"] == pytest.approx(1 / 3)


def test_an_answer_that_is_a_number_is_an_answer_and_no_figure():
    returned = [
        {"score": 1.0, "pred": 4, "acc": 1},
        {"score": 1.0, "pred": 4.0},
        {"score": 0, "pred": 5},
    ]
    outcomes = [outcome_from(value, "f") for value in returned]
    assert outcomes[0].components == {"acc": 1.0}
    found = means(validation_metrics([sample(0, outcome) for outcome in outcomes], 3))
    assert found["majority@3"] == 1.0


def test_majority_is_left_out_where_a_source_names_no_answers():
    samples = [answered(0, 1.0, "4", "a"), sample(1, 0.0, "b")]
    found = means(validation_metrics(samples, 1))
    assert "a/majority@1" in found
    assert "b/majority@1" not in found
    assert "majority@1" not in found


def test_failures_are_counted_and_are_never_a_zero():
    samples = [sample(0, s) for s in (1.0, 1.0, FAILED, FAILED)]
    samples += [sample(1, s) for s in (0.0, 1.0, 0.0, 1.0)]
    samples += [sample(2, FAILED) for _ in range(4)]
    found = means(validation_metrics(samples, 4))
    assert found["failures"] == 6
    assert found["mean@4"] == (1.0 + 0.5) / 2
    assert found["pass@4"] == 1.0
    assert found["pass@1"] == (1.0 + 0.5) / 2


def test_where_nothing_could_be_scored_there_are_no_figures():
    metrics = validation_metrics([sample(0, FAILED, "a"), sample(1, FAILED)], 1)
    assert metrics == {"val/failures": 2.0, "val/response_length/mean": 5.0}
    assert validation_metrics([], 4) == {"val/failures": 0.0}


@pytest.mark.parametrize(
    ("score", "components", "passes"),
    [
        (0.5, {}, 1.0),
        (0.1, {}, 0.0),
        (-1.0, {}, 0.0),
        (0.1, {"acc": 1.0}, 1.0),
        (1.0, {"accuracy": 0.0}, 0.0),
        (0.4, {"correct": 1.0}, 1.0),
        (1.0, {"format": 0.0}, 1.0),
    ],
)
def test_a_sample_passes_by_its_accuracy_or_else_its_score(score, components, passes):
    outcome = Score(value=score, components=components)
    assert validation_metrics([sample(0, outcome)], 1)["val/pass@1"] == passes


def test_accuracy_is_what_the_reward_calls_right_where_it_says_so_of_every_sample():
    def graded(score, **components):
        return Score(value=score, components=components)

    judged = [sample(0, graded(0.1, acc=1.0), "a"), sample(1, graded(0.9, acc=0.0), "a")]
    found = means(validation_metrics([*judged, sample(2, FAILED, "a")], 1))
    assert (found["a/acc@1"], found["acc@1"], found["mean@1"]) == (0.5, 0.5, 0.5)
    assert main_metric({"val/acc@1": 0.5, "val/mean@1": 0.5}, 1) == "val/acc@1"
    mixed = means(validation_metrics([*judged, sample(3, 1.0, "b")], 1))
    assert "a/acc@1" in mixed
    assert not {"b/acc@1", "acc@1"} & mixed.keys()
    assert main_metric({"val/mean@1": 0.5}, 1) == "val/mean@1"


def test_the_threshold_can_be_set():
    samples = [sample(0, 3.0), sample(1, 5.0)]
    assert validation_metrics(samples, 1, pass_threshold=4.0)["val/pass@1"] == 0.5


def test_figures_do_not_depend_on_the_order_of_the_samples_beyond_the_draws():
    rng = np.random.default_rng(0)
    samples = [answered(p, float(rng.random() < 0.5), "ab"[p % 2]) for p in range(9) for _ in "xyz"]
    straight = validation_metrics(samples, 3)
    assert straight == validation_metrics(samples, 3)
    turned = means(validation_metrics(samples[::-1], 3))
    exact = {name: v for name, v in means(straight).items() if name != "majority@2"}
    assert {name: turned[name] for name in exact} == pytest.approx(exact)


def test_every_metric_has_its_name_foretold():
    outcome = Score(value=1.0, components={"acc": 1.0}, extras={"pred": "4"})
    samples = [sample(p, outcome, "a") for p in range(3) for _ in range(6)]
    assert set(validation_metrics(samples, 6)) == set(metric_names(6, ["a"]))


def test_a_large_validation_is_worked_out_in_a_moment():
    rng = np.random.default_rng(0)
    samples = [
        answered(p, float(rng.random() < 0.5), str(rng.integers(4)), f"s{p % 3}")
        for p in range(1319)
        for _ in range(8)
    ]
    began = time.process_time()
    validation_metrics(samples, 8)
    assert time.process_time() - began < 30.0
