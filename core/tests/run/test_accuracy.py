"""The accuracy in a run's summary is of one metric from first to last."""

from __future__ import annotations

import attrs
import pytest

from dovetail.run.accuracy import AccuracyKeeper
from dovetail.run.checkpoints import RunState

BOTH = {"val/mean@1": 0.75, "val/acc@1": 0.25}


class Log:
    def __init__(self):
        self.warnings = []

    def warning(self, text, **fields):
        self.warnings.append(text)


@pytest.fixture
def log():
    return Log()


def accuracy(state):
    return state.accuracy_metric, state.accuracy_before, state.accuracy_after


def test_the_first_validation_chooses_the_metric_and_the_others_follow(log):
    keeper = AccuracyKeeper(log)
    state = keeper.updated(RunState(), {"val/failures": 2.0}, 1)
    assert accuracy(state) == (None, None, None)
    state = keeper.updated(state, {"val/mean@1": 0.5}, 1)
    state = keeper.updated(attrs.evolve(state, step=3), BOTH, 1)
    assert accuracy(state) == ("val/mean@1", 0.5, 0.75)
    assert log.warnings == []


def test_a_validation_without_the_metric_keeps_the_former_value_and_warns_once(log):
    keeper = AccuracyKeeper(log)
    state = keeper.updated(RunState(), BOTH, 1)
    for step in (1, 2):
        state = keeper.updated(attrs.evolve(state, step=step), {"val/mean@1": 0.9}, 1)
    assert accuracy(state) == ("val/acc@1", 0.25, None)
    [warning] = log.warnings
    assert "no val/acc@1: not every scored response has one of the components acc" in warning
    state = keeper.updated(attrs.evolve(state, step=3), {"val/mean@1": 0.9, "val/acc@1": 0.5}, 1)
    assert accuracy(state) == ("val/acc@1", 0.25, 0.5)


def test_a_validation_of_which_nothing_was_scored_keeps_the_former_value(log):
    state = AccuracyKeeper(log).updated(RunState(), BOTH, 1)
    assert AccuracyKeeper(log).updated(state, {"val/failures": 4.0}, 1) == state
    assert log.warnings == []


@pytest.mark.parametrize("figures", [("acc", "mean"), ("mean",)])
def test_another_number_of_responses_chooses_the_metric_anew_and_says_so(log, figures):
    keeper = AccuracyKeeper(log)
    state = attrs.evolve(keeper.updated(RunState(), BOTH, 1), step=5)
    metrics = {f"val/{figure}@14": 0.5 for figure in figures}
    for _ in range(2):
        state = keeper.updated(state, metrics, 14)
        assert accuracy(state) == (f"val/{figures[0]}@14", None, 0.5)
    [warning] = log.warnings
    assert "rollout.validation.n is 14 now" in warning
    assert f"the summary tells val/{figures[0]}@14" in warning
