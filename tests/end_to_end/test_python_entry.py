"""`dovetail.train`, `resume`, `plan` and `check` from Python: with a function and rows of the caller's own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_files import lines_of, tensors_of

import dovetail
from dovetail.errors import ConfigError, DataError, StopRequested
from dovetail.telemetry import read_rows


@pytest.fixture
def settings(config: Path, tmp_path: Path) -> dict[str, Any]:
    """The tiny run's settings without data and reward."""
    given: dict[str, Any] = yaml.safe_load(config.read_text())
    given["data"] = {k: v for k, v in given["data"].items() if not k.endswith("_files")}
    given.pop("reward", None)
    return {**given, "output_dir": str(tmp_path / "python"), "tracking": ["jsonl"]}


def rows(count: int) -> list[dict[str, Any]]:
    """Sums to train on."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{i} + 1"}],
            "reward_model": {"ground_truth": i + 1},
        }
        for i in range(count)
    ]


def half(solution_str: str, ground_truth: int) -> float:
    """0.5 for every second length."""
    return 0.5 * (len(solution_str) % 2)


def test_a_run_from_python_trains_as_from_the_command_line(config: Path, tmp_path: Path) -> None:
    from dovetail.run.run import train

    command = train(config, [f"output_dir={tmp_path / 'command'}"])
    python = dovetail.train(config, [f"output_dir={tmp_path / 'python'}"])
    assert python["status"] == "completed"
    ours, theirs = (tensors_of(Path(made["directory"]), 3) for made in (python, command))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_rows_and_a_function_of_the_callers_train_in_a_notebook_and_are_resumed(
    settings: dict[str, Any],
) -> None:
    seen = set()

    def reward(solution_str: str, ground_truth: int) -> float:
        seen.add(ground_truth)
        return half(solution_str, ground_truth)

    async def cell() -> dict[str, Any]:
        return dovetail.train(
            settings,
            ["trainer.total_steps=1"],
            reward=reward,
            dataset=rows(16),
            val_dataset=rows(2),
        )

    summary = asyncio.run(cell())  # a loop runs in this thread, as in a notebook
    assert (summary["status"], summary["steps"]) == ("completed", 1)
    assert seen <= set(range(1, 17))
    summary = dovetail.resume(summary["directory"], ["trainer.total_steps=2"], reward=reward)
    assert summary["steps"] == 2
    lines = lines_of(Path(summary["directory"]) / "metrics.jsonl")
    scores = [m["reward/mean"] for m in lines if "reward/mean" in m]
    assert len(scores) == 2
    assert all(0 <= score <= 0.5 for score in scores)


@pytest.mark.timeout(300)  # for a stop that does not arrive
def test_what_a_library_warns_of_is_in_the_runs_log_and_on_the_console(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def warning(solution_str: str, ground_truth: int) -> float:
        logging.getLogger("somelibrary").warning("odd %s", "answer")
        return half(solution_str, ground_truth)

    summary = dovetail.train(settings, ["trainer.total_steps=2"], reward=warning, dataset=rows(16))
    directory = Path(summary["directory"])
    logged = [row for row in read_rows(directory / "events.jsonl") if row["event"] == "odd answer"]
    assert {row["step"] for row in logged} == {1, 2}
    expected = {"run": "/".join(directory.parts[-2:]), "logger": "somelibrary", "level": "warning"}
    assert all(row.items() >= expected.items() for row in logged)
    assert "warning: odd answer  step=2\n" in capsys.readouterr().err


def test_a_stop_in_a_notebook_ends_the_phase_and_saves(settings: dict[str, Any]) -> None:
    scored = threading.Event()

    def reward(solution_str: str) -> float:
        if not scored.is_set():
            scored.set()
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    # The main thread hears of the signal when the run's thread lets it, on a busy machine after some of these small steps.
    endless = ["trainer.total_steps=100000", "trainer.save_every=0"]

    async def cell() -> dict[str, Any]:
        overrides = [*endless, "trainer.validate_before=false"]
        return dovetail.train(settings, overrides, reward=reward, dataset=rows(16))

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(StopRequested):
        asyncio.run(cell())
    assert signal.getsignal(signal.SIGINT) is before
    directory = Path(settings["output_dir"]) / settings["project"] / settings["experiment"]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert (directory / "checkpoints" / f"step_{summary['steps']}").is_dir()


def test_a_script_trains(settings: dict[str, Any], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import dovetail\n\n"
        "def reward(solution_str, ground_truth):\n    return float(len(solution_str) % 2)\n\n"
        "if __name__ == '__main__':\n"
        f"    rows = {rows(16)!r}\n"
        f"    print(dovetail.train({settings!r}, ['trainer.total_steps=1'], reward=reward, dataset=rows)['status'])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "completed"


def test_plan_and_check_say_what_a_run_would_do(settings: dict[str, Any]) -> None:
    plan = dovetail.plan(settings, dataset=rows(16))
    assert [part["name"] for part in plan["collection"]] == ["rollout", "reward"]
    assert [stage["name"] for stage in plan["stages"]][-2:] == ["advantage", "update_actor"]
    assert plan["stages"][-1]["reads"]["advantages"] == 1
    assert plan["publication"]["name"] == "weight_sync"
    assert dovetail.check(settings, reward=half, dataset=rows(16)).errors == ()
    [error] = dovetail.check(settings, dataset=rows(16)).errors
    assert "reward" in error.message


def test_what_is_given_takes_the_place_of_what_the_config_names(
    config: Path, tmp_path: Path
) -> None:
    summary = dovetail.train(
        config, ["trainer.total_steps=1", "tracking=[jsonl]"], reward=lambda: 0.25, dataset=rows(16)
    )
    lines = lines_of(Path(summary["directory"]) / "metrics.jsonl")
    assert [m["reward/mean"] for m in lines if "reward/mean" in m] == [0.25]
    saved = yaml.safe_load((Path(summary["directory"]) / "config.yaml").read_text())
    assert saved["data"]["train_files"] != [str(tmp_path / "train.jsonl")]
    assert saved["data"]["val_files"] == [str(tmp_path / "val.jsonl")]


def test_rows_that_are_no_table_and_functions_with_other_parameters_are_refused(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(DataError, match=r"data\.train_files"):
        dovetail.plan(settings, dataset=[{"prompt": 1}, {"prompt": "text"}])
    with pytest.raises(ConfigError, match="missing"):
        dovetail.train(settings, reward=lambda missing: 0.0, dataset=rows(16))
