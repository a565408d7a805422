"""`dovetail runs list`, and resumes with fewer steps or fewer trained roles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from dovetail.errors import ConfigError
from dovetail.run.run import resume, train
from dovetail.telemetry import RunDirectory
from dovetail.telemetry.run_directory import MARKER


def test_runs_are_listed_as_they_stand(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    assert "there is no run" in inside("runs", "list", str(runs)).output
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


def test_damaged_runs_are_listed_with_what_they_still_tell(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    train(config, ["trainer.total_steps=1"])
    run = tmp_path / "runs" / "tests" / "run"
    damages = {
        "checkpoints/best": b"{",
        "checkpoints/latest": b"\xff\xfe",
        "checkpoints/step_1/manifest.json": b"\xff",
        "plan.json": b'{"counts": {"steps": 3}}',
        "summary.json": b"[]",
        "metrics.jsonl": b'{"step": "one"}\n',
        "config.yaml": b"\xff",
        MARKER: b"null",
    }
    for number, (name, content) in enumerate(damages.items()):
        damaged = run.with_name(f"damaged_{number}")
        shutil.copytree(run, damaged)
        (damaged / name).write_bytes(content)
    rows = json.loads(inside("runs", "list", str(tmp_path / "runs"), "--json").output)
    assert len(rows) == 1 + len(damages)
    found = {Path(row["path"]).name: row for row in rows}
    assert [found[f"damaged_{number}"]["step"] for number in range(len(damages))] == [
        *(1, 1, 1, 1, 1),
        *(None, 1, 1),
    ]
    assert found["damaged_4"]["state"] == "killed"
    assert "unknown of 1" in inside("runs", "list", str(tmp_path / "runs")).output


def test_fewer_steps_than_are_done_are_said_as_they_are(config: Path, tmp_path: Path) -> None:
    train(config)
    with pytest.raises(ConfigError, match="3 steps are done, and the run has 2"):
        resume(tmp_path / "runs" / "tests" / "run", ["trainer.total_steps=2"])


def test_a_role_that_is_trained_no_longer_is_named(config: Path, tmp_path: Path) -> None:
    train(config, ["algorithm.advantage=gae", "trainer.total_steps=1"])
    run = tmp_path / "runs" / "tests" / "run"
    train(config, ["algorithm.advantage=grpo"], accept_changes=True)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    [warning] = [event for event in events if "no longer trains" in str(event)]
    assert warning["role"] == "critic"
