"""The supervisor of a run, with real processes that end as scripted."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from dovetail.checkpoint import CheckpointStore
from dovetail.config import config_from_mapping
from dovetail.errors import RunDirectoryError
from dovetail.telemetry import RunDirectory
from dovetail_console import supervise
from dovetail_console.commands.runs import cells
from dovetail_console.run_overview import overview

PROCESS = """#!/bin/bash
# Takes the next line of the script: steps that are logged, and how the process ends.
read -r steps ending < {script}
sed -i 1d {script}
echo "$*" >> {calls}
for step in $steps; do echo "{{\\"step\\": $step}}" >> {metrics}; done 2> /dev/null
case "$ending" in
    KILL | TERM | INT | SEGV) kill -s "$ending" $$ ;;
    told) echo "a plugin's error" > "$DOVETAIL_SUPERVISED_CAUSE"; exit 1 ;;
    wait) trap 'exit 143' TERM; while true; do sleep 0.05; done ;;
    *) exit "$ending" ;;
esac
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of a run that has begun."""
    return RunDirectory.create(tmp_path / "runs" / "math" / "grpo").path


@pytest.fixture
def attempt(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, int]]:
    """A function that supervises processes with scripted ends, and returns the exit code and the number of processes."""
    script, calls, program = (tmp_path / name for name in ("script", "calls", "program"))
    names = {"script": script, "calls": calls, "metrics": path / "metrics.jsonl"}
    program.write_text(PROCESS.format(**names))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(supervise, "FIRST_PAUSE", 0.01)

    def run(
        *endings: str, restarts: int = 20, resume: str = "auto", **sections: Any
    ) -> tuple[int, int]:
        script.write_text("".join(f"{ending}\n" for ending in endings))
        calls.write_text("")
        trainer = {"run_restarts": restarts, "resume": resume}
        document = {"model": {"path": "m"}, "trainer": trainer, **sections}
        config = config_from_mapping(document).config
        code = 0
        try:
            cause = tmp_path / "cause"
            variables = {"DOVETAIL_SUPERVISED_CAUSE": str(cause)}
            supervise.supervise(config, path, ["train", "c.yaml"], variables, cause)
        except click.exceptions.Exit as ended:
            code = ended.exit_code
        return code, len(calls.read_text().splitlines())

    return run


def restarts(path: Path) -> list[dict[str, Any]]:
    return overview(path)["restarts"]


@pytest.mark.parametrize("ending", ["75", "KILL", "SEGV"])
def test_a_failure_of_the_infrastructure_is_followed_by_a_restart(
    attempt: Any, path: Path, ending: str
) -> None:
    assert attempt(f"1 {ending}", "2 0") == (0, 2)
    [row] = restarts(path)
    assert row["exit_code"] == {"75": 75, "KILL": 137, "SEGV": 139}[ending]
    assert ending in row["cause"]


@pytest.mark.parametrize(("ending", "code"), [("1", 1), ("2", 2), ("3", 3), ("143", 143), ("TERM", 143)])  # fmt: skip
def test_other_endings_are_passed_on(attempt: Any, path: Path, ending: str, code: int) -> None:
    # Without a step, the command has not shown that it can train.
    assert attempt(f"0 {ending}", "1 0") == (code, 1)
    assert restarts(path) == []


def test_a_command_that_has_trained_may_lack_for_a_while_what_it_asks_for(attempt: Any) -> None:
    assert attempt("1 75", "1 2", "2 0") == (0, 3)


def test_a_process_that_ends_without_an_error_of_its_own_is_started_again(attempt: Any) -> None:
    assert attempt("1 1", "2 0") == (0, 2)
    assert attempt("3 told", "4 0") == (1, 1)


def test_two_restarts_in_a_row_without_a_new_step_end_it(attempt: Any, capsys: Any) -> None:
    assert attempt("0 75", "0 75", "0 75", "1 0") == (75, 3)
    assert "row completed" in capsys.readouterr().err
    # A new step resets the count; a repeated step is no new step.
    assert attempt("1 75", "1 75", "2 75", "2 75", "2 75", "3 0") == (75, 5)


def test_there_are_no_more_restarts_than_the_config_allows(attempt: Any) -> None:
    assert attempt("1 KILL", "2 KILL", "3 KILL", "4 0", restarts=2) == (137, 3)


TRACKER = """
from dovetail.interfaces import Tracker
from dovetail.sections import PluginSection


class Listening(Tracker):
    name = "listening"
    api = ">=1.0,<2"
    Config = PluginSection

    def _note(self, *what):
        with open("{heard}", "a") as file:
            print(*what, file=file)

    def start(self):
        self._note("start")

    def metrics_logged(self, step, metrics):
        self._note("metrics")

    def close(self):
        self._note("close")
"""
HOOK = """
    def given_up(self, directory, step, total_steps, cause):
        self._note(directory, step, total_steps, cause)
"""


def test_trackers_hear_that_a_run_is_given_up_whose_process_was_killed(
    attempt: Any, path: Path, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    for name, text in (("deaf", TRACKER), ("listening", TRACKER + HOOK)):
        (tmp_path / f"{name}.py").write_text(text.format(heard=heard))
    names = ("deaf", "listening")
    tracking = [{"path": f"{tmp_path / n}.py", "attribute": "Listening"} for n in names]
    assert attempt("1 KILL", "2 0", restarts=1, tracking=tracking) == (0, 2)
    assert not heard.exists()
    (path / "summary.json").write_text('{"total_steps": 9}')
    assert attempt("3 KILL", "4 KILL", restarts=1, tracking=tracking) == (137, 2)
    assert heard.read_text().splitlines() == ["start", f"{path} 4 9 killed by SIGKILL", "close"]


def test_a_tracker_that_fails_does_not_change_how_a_supervisor_ends(
    attempt: Any, tmp_path: Path
) -> None:
    file = tmp_path / "failing.py"
    file.write_text(TRACKER.format(heard=tmp_path / "no" / "folder") + HOOK)
    tracking = [{"path": str(file), "attribute": "Listening"}]
    assert attempt("1 75", "2 KILL", "3 0", restarts=1, tracking=tracking) == (137, 2)


def test_a_restart_names_its_cause_and_the_steps_that_are_repeated(
    attempt: Any, path: Path
) -> None:
    store = CheckpointStore(path / "checkpoints")
    store.save(2, lambda directory: (directory / "x").write_text("x"))
    assert attempt("3 75", "5 KILL", "6 0") == (0, 3)
    assert [(row["step"], row["from_step"], row["repeated"]) for row in restarts(path)] == [
        (3, 2, 1),
        (5, 2, 3),
    ]
    row = overview(path)
    assert "2 restarts, 4 steps repeated" in " ".join(cells(row))
    json.dumps(row)


def test_a_cause_is_that_of_the_process_and_of_no_other_one(
    attempt: Any, path: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    said = 'echo -n "the engine did not start" > $DOVETAIL_SUPERVISED_CAUSE; exit 75'
    program.write_text(program.read_text().replace("    wait)", f"    says) {said} ;;\n    wait)"))
    assert attempt("1 says", "2 KILL", "3 0") == (0, 3)
    assert [row["cause"] for row in restarts(path)] == ["the engine did not start", "killed by SIGKILL"]  # fmt: skip


def test_a_run_that_may_not_be_resumed_is_all_the_same_by_its_supervisor(
    attempt: Any, tmp_path: Path
) -> None:
    attempt("1 75", "2 75", "3 0", resume="never")
    first, *others = (tmp_path / "calls").read_text().splitlines()
    assert "trainer.resume" not in first
    assert [line.split().count("trainer.resume=auto") for line in others] == [1, 1]


def test_a_signal_stops_the_process_and_the_supervisor(attempt: Any) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert attempt("1 wait", "2 0") == (143, 1)


def test_a_signal_ends_the_pause_before_a_restart(
    attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE", 600.0)
    # A jump of the wall clock has no effect, since pauses are measured by the monotonic clock.
    monkeypatch.setattr(time, "time", iter(range(0, 10**9, 10**6)).__next__)
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert attempt("1 75", "2 0") == (143, 1)


def test_a_run_that_another_process_has_continued_is_left_to_it(attempt: Any, path: Path) -> None:
    with RunDirectory(path).held(), pytest.raises(RunDirectoryError, match="another process"):
        attempt("1 75", "2 0")
