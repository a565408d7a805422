"""What the summary of a run tells over several sittings: the whole training time, and the best checkpoint."""

from __future__ import annotations

import json

import pytest

from dovetail.checkpoint.mark import BestCheckpoint
from dovetail.run.checkpoints import RunState, with_earlier_seconds


@pytest.mark.parametrize(
    ("at_checkpoint", "in_summary", "after"),
    [
        (20.0, 28.3, 28.3),  # the last validation came after the checkpoint
        (30.0, 28.3, 30.0),  # a later sitting was killed before it could write a summary
    ],
)
def test_a_resumed_run_goes_on_from_the_whole_time_before(run, at_checkpoint, in_summary, after):
    run.write_json("summary.json", {"train_seconds": in_summary})
    state = with_earlier_seconds(RunState(step=5, train_seconds=at_checkpoint), run)
    assert state == RunState(step=5, train_seconds=after)


@pytest.mark.parametrize("summary", [None, "[]", "{}", '{"train_seconds": null}', '{"train_s'])
def test_without_an_earlier_summary_the_checkpoint_counts(run, summary):
    if summary is not None:
        run.summary.write_text(summary)
    state = RunState(step=5, train_seconds=20.0)
    assert with_earlier_seconds(state, run) == state


def test_the_summary_tells_step_metric_value_and_place_of_the_best_checkpoint(run):
    best = BestCheckpoint(path=run.checkpoints / "step_30", metric="val/mean@4", value=0.648)
    told = best.to_summary()
    assert told == {
        "step": 30,
        "metric": "val/mean@4",
        "value": 0.648,
        "path": str(run.checkpoints / "step_30"),
    }
    assert json.loads(json.dumps(told)) == told
