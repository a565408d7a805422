"""The accuracy in a run's summary uses one metric before and after training."""

from __future__ import annotations

import pytest

from dovetail_rollouts.validation import Accuracy

BOTH = {"val/mean@1": 0.75, "val/acc@1": 0.25}


class Log:
    def __init__(self):
        self.warnings = []

    def warning(self, text, **fields):
        self.warnings.append(text)


@pytest.fixture
def log():
    return Log()


def values(accuracy):
    return accuracy.metric, accuracy.before, accuracy.after


def test_the_first_validation_chooses_the_metric_and_the_others_follow(log):
    accuracy = Accuracy(log)
    accuracy.update({"val/failures": 2.0}, 1, 0)
    assert values(accuracy) == (None, None, None)
    accuracy.update({"val/mean@1": 0.5}, 1, 0)
    accuracy.update(BOTH, 1, 3)
    assert values(accuracy) == ("val/mean@1", 0.5, 0.75)
    assert log.warnings == []


def test_a_validation_without_the_metric_keeps_the_former_value_and_warns_once(log):
    accuracy = Accuracy(log)
    accuracy.update(BOTH, 1, 0)
    for step in (1, 2):
        accuracy.update({"val/mean@1": 0.9}, 1, step)
    assert values(accuracy) == ("val/acc@1", 0.25, None)
    [warning] = log.warnings
    assert "no val/acc@1: not" in warning
    accuracy.update({"val/mean@1": 0.9, "val/acc@1": 0.5}, 1, 3)
    assert values(accuracy) == ("val/acc@1", 0.25, 0.5)


def test_a_validation_of_which_nothing_was_scored_keeps_the_former_value_also_after_a_resume(log):
    before, after = Accuracy(log), Accuracy(log)
    before.update(BOTH, 1, 0)
    after.load_state(before.state())
    after.update({"val/failures": 4.0}, 1, 0)
    assert values(after) == values(before) == ("val/acc@1", 0.25, None)
    assert log.warnings == []


@pytest.mark.parametrize("figures", [("acc", "mean"), ("mean",)])
def test_another_number_of_responses_chooses_the_metric_anew_and_says_so(log, figures):
    accuracy = Accuracy(log)
    accuracy.update(BOTH, 1, 0)
    metrics = {f"val/{figure}@14": 0.5 for figure in figures}
    for _ in range(2):
        accuracy.update(metrics, 14, 5)
        assert values(accuracy) == (f"val/{figures[0]}@14", None, 0.5)
    [warning] = log.warnings
    assert "rollout.validation.n is now 14" in warning
    assert f"the summary has val/{figures[0]}@14" in warning
