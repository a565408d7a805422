"""LearningWarnings: the warnings of a run that can't learn, and the memory of a resumed run."""

from __future__ import annotations

import pytest

from dovetail.hooks import Observers
from dovetail.telemetry.jsonl import append_rows
from dovetail_diagnosis.learning_warnings import LearningWarnings

CUT = {"response_length/clip_ratio": 0.91, "response_length/limit": 32.0}


class Heard:
    """A logger that keeps its warnings."""

    def __init__(self):
        self.warnings = []

    def warning(self, message, **facts):
        self.warnings.append((message, facts))


@pytest.fixture
def heard():
    return Heard()


def finish(heard, directory, steps, start=0):
    observers = Observers()
    observers.add(LearningWarnings(heard))
    observers.hook.run_started(
        config=None, plan=None, directory=directory, start_step=start, total_steps=99
    )
    for step in steps:
        observers.hook.metrics_logged(step=step, metrics=CUT)
    observers.hook.run_finished(summary={})
    assert not observers.failures


def test_a_warning_says_what_is_seen_and_what_to_try(heard, tmp_path):
    finish(heard, tmp_path, range(1, 9))
    (message, facts), (_, at_end) = heard.warnings
    assert "response_length/clip_ratio 0.91, response_length/limit 32" in message
    assert facts["warning"] == "cut"
    assert "data.max_response_length" in facts["hint"]
    assert at_end == {"warnings": "cut since step 1"}


def test_a_resumed_run_counts_the_steps_before(heard, tmp_path):
    append_rows(tmp_path / "metrics.jsonl", [{"step": step, **CUT} for step in range(1, 4)])
    finish(heard, tmp_path, [4], start=3)
    assert heard.warnings == []
    finish(heard, tmp_path, [4, 5], start=3)
    assert [facts for _, facts in heard.warnings][-1] == {"warnings": "cut since step 1"}


def test_a_run_without_warnings_says_nothing(heard, tmp_path):
    finish(heard, tmp_path, range(1, 5))
    assert heard.warnings == []
