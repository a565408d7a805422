"""`dovetail runs list`, and resumes with fewer steps or fewer trained roles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from dovetail.run.run import train
from dovetail.telemetry import RunDirectory


def test_runs_are_listed_as_they_stand(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    assert "no run" in inside("runs", "list", str(runs)).output
    train(config)
    train(config, ["experiment=killed", "trainer.total_steps=1"])
    killed = RunDirectory.open(runs / "tests" / "killed")
    killed.write_json("summary.json", {**killed.read_json("summary.json"), "status": "running"})
    killed.config.write_text("model: [")
    (runs / "tests" / "another").mkdir()
    with RunDirectory.open(runs / "tests" / "run").held():
        held = json.loads(inside("runs", "list", str(runs), "--json").output)
    states = {Path(row["path"]).name: row["state"] for row in held}
    assert states == {"run": "running", "killed": "killed"}
    rows = {
        Path(row["path"]).name: row
        for row in json.loads(inside("runs", "list", str(runs), "--json").output)
    }
    assert rows["run"]["state"] == "completed"
    assert rows["run"]["checkpoint"] == "step_3"
    assert (rows["run"]["step"], rows["run"]["total_steps"]) == (3, 3)
    assert (rows["killed"]["model"], rows["killed"]["total_steps"]) == (None, 1)
    shown = inside("runs", "list", str(runs)).output
    assert "3 of 3" in shown


def test_a_role_that_is_trained_no_longer_is_named(config: Path, tmp_path: Path) -> None:
    train(config, ["algorithm.advantage=gae", "trainer.total_steps=1"])
    run = tmp_path / "runs" / "tests" / "run"
    train(config, ["algorithm.advantage=grpo"], accept_changes=True)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    [warning] = [event for event in events if "no longer trains" in str(event)]
    assert warning["role"] == "critic"
