"""`profile` in a config: traces of some steps in the run directory, or one error before the first step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def test_a_run_writes_traces_of_the_steps_that_were_asked_for(inside, config: Path) -> None:
    inside("train", str(config), "profile.tool=torch", "profile.steps=[2,9]")
    run = config.parent / "runs" / "tests" / "run"
    (trace,) = (run / "profiles").iterdir()
    assert trace.name == "actor-rank0-steps2-3.json.gz"
    with gzip.open(trace) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("actor.update") == 2
    assert names.count("actor.send_weights") == 2
    events = (run / "events.jsonl").read_text()
    assert "profile written" in events
    assert "exceeds the run's 3 steps" in events


def test_a_tool_that_can_not_record_here_stops_the_run_before_its_first_step(
    inside, config: Path
) -> None:
    done = inside("train", str(config), "profile.tool=memory", "runtime.device=cpu", check=False)
    assert done.exit_code != 0
    assert "profile.tool=memory" in done.output
    assert "Traceback" not in done.output
    # Nothing is left to stand in the way of the next try.
    assert not (config.parent / "runs/tests/run").exists()
