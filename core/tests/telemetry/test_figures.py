"""Key figures are found, written and drawn in characters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from dovetail.telemetry.figures import ACCURACY, REWARD, bucket_means, sparkline, write_figure
from dovetail.telemetry.jsonl import append_rows
from dovetail.telemetry.summary import History, count_events, summarise


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (0.4567, "number", "0.457"),
        (0.00012, "number", "0.00012"),
        (12.3456, "number", "12.35"),
        (0.0, "number", "0.000"),
        (1.2e7, "number", "1.20e+07"),
        (0.875, "percent", "87.5%"),
        (12.5, "percent", "12.5"),
        (4096.4, "length", "4,096"),
        (0.0031, "seconds", "3.1 ms"),
        (59.99, "seconds", "1 min 00 s"),
        (125.0, "seconds", "2 min 05 s"),
        (12000.0, "seconds", "3 h 20 min"),
        (math.nan, "number", "nan"),
        (-math.inf, "percent", "-inf"),
    ],
)
def test_figures_are_written_briefly(value, style, text):
    assert write_figure(value, style) == text


def test_accuracy_is_found_whatever_n_it_was_sampled_with():
    assert ACCURACY.value({"val/gsm8k/acc@4": 0.1, "val/acc@4": 0.5}) == 0.5
    assert ACCURACY.value({"val/gsm8k/acc@4": 0.1}) is None
    assert REWARD.value({"reward/mean": math.nan}) is None


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 30))
def test_a_sparkline_is_never_wider_than_asked(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=100), st.integers(1, 10))
def test_bucket_means_cover_every_value_once(values, count):
    means = bucket_means(values, count)
    assert min(values) - 1e-9 <= min(means)
    assert max(means) <= max(values) + 1e-9
    if len(values) % len(means) == 0:
        assert sum(means) / len(means) == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_a_sparkline_rises_with_its_series():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([math.nan]) == ""


def test_lines_of_one_step_are_merged():
    history = History(
        [{"step": 2, "a": 1.0, "b": 5}, {"step": 1, "a": 0.5}, {"step": 2, "a": 2.0, "c": None}]
    )
    assert history.steps == [1, 2]
    assert history.at(2) == {"a": 2.0, "b": 5, "c": None}
    assert history.series("a") == ([1, 2], [0.5, 2.0])
    assert history.not_finite() == {"c": [2]}


def test_a_run_is_summarised_from_its_metrics(finished):
    summary = summarise(finished.path)
    assert summary["steps"] == 6
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert summary["accuracy_metric"] == "val/mean@1"
    assert summary["reward_steps"] == 3
    assert summary["reward_first"] == pytest.approx(0.2)
    assert summary["reward_last"] == pytest.approx(0.5)
    assert summary["seconds_per_step"] == 1.0
    assert summary["step_seconds"] == 6.0
    assert summary["tokens_per_second"] == 1003.5
    assert summary["reward_failures"] == 1


BEGUN_WITHOUT_ACC = [
    {"step": 0, "val/mean@1": 0.62},
    {"step": 1, "val/mean@1": 0.8, "val/acc@1": 0.3},
    {"step": 2, "val/mean@1": 0.85, "val/acc@1": 0.35},
]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ("val/mean@1", 0.62, 0.85, 0.85)),
        ("val/mean@1", ("val/mean@1", 0.62, 0.85, 0.85)),
        ("val/acc@1", ("val/acc@1", 0.3, 0.35, 0.35)),
        ("val/acc@4", ("val/mean@1", 0.62, 0.85, 0.85)),
    ],
)
def test_accuracy_is_told_by_the_metric_of_the_summary_or_the_first_validations(
    run, named, expected
):
    append_rows(run.metrics, BEGUN_WITHOUT_ACC)
    if named:
        run.write_json("summary.json", {"accuracy_metric": named})
    found = summarise(run.path)
    names = ("accuracy_metric", "accuracy_before", "accuracy_after", "accuracy_best")
    assert tuple(found[name] for name in names) == expected


def test_a_run_without_metrics_has_no_figures(run):
    assert summarise(run.path) == {"steps": 0}


def test_warnings_and_errors_are_counted_by_event(run):
    levels = ["info", "warning", "error", "warning"]
    events = ["began", "slow", "slow", "slow"]
    append_rows(
        run.events, [{"level": le, "event": e} for le, e in zip(levels, events, strict=True)]
    )
    assert count_events(run.path) == [("warning", "slow", 2), ("error", "slow", 1)]
