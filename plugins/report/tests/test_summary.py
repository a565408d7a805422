"""The results of a run, read from the files of its directory."""

from __future__ import annotations

import pytest

from dovetail.telemetry.jsonl import append_rows, read_rows
from dovetail_report.summary import History, count_events, summarise


def test_lines_of_one_step_are_merged():
    history = History(
        [{"step": 2, "a": 1.0, "b": 5}, {"step": 1, "a": 0.5}, {"step": 2, "a": 2.0, "c": None}]
    )
    assert history.steps == [1, 2]
    assert history.at(2) == {"a": 2.0, "b": 5, "c": None}
    assert history.series("a") == ([1, 2], [0.5, 2.0])
    assert history.not_finite == {"c": [2]}


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
    assert count_events(read_rows(run.events)) == [("warning", "slow", 2), ("error", "slow", 1)]
