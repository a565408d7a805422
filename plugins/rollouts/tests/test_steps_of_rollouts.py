"""Steps of a run whose samples are all dropped by filters, or differ from the request."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Groups, PluginContext, SampleFilter
from dovetail.sections import PluginSection


class DropAll(SampleFilter):
    name = "nothing"
    api = ">=1.0,<2"
    action = "drop"

    def keep(self, columns: Batch, groups: Groups) -> np.ndarray:
        return np.zeros(len(columns), np.bool_)


def test_a_step_that_filters_emptied_counts_and_warns(compose, tmp_path):
    drop = DropAll(PluginSection(name="nothing"), PluginContext())
    made = compose("algorithm.max_generation_rounds=2", filters={"nothing": drop})
    made.take(1)
    assert made.run.position.step == 1
    assert made.roles["actor"].trained == []
    assert made.engine.versions == [1]
    assert made.ledger.counts()["dropped"] == {"filter:nothing": 4}
    assert made.metrics["filter/generated_prompts"] == 4
    assert made.metrics["actor/updates"] == 0
    assert any("no group is left" in warning for warning in made.logger.warnings)
    lines = (tmp_path / "run" / "samples" / "step_1.jsonl").read_text().splitlines()
    assert [json.loads(line)["filtered"] for line in lines] == ["nothing"] * 8
    made.ledger.check()


def test_completions_are_checked_in_the_first_step_of_a_process_alone(compose):
    made = compose()
    made.take(1)
    made.engine.script = attrs.evolve(made.engine.script, answer=lambda _, sample: [1] * 9)
    made.take(1)  # longer than requested
    again = attrs.evolve(made.run, steps_begun=0)
    with pytest.raises(PluginBrokenError, match="at most 5"), again.step() as step:
        again.collect(step)
