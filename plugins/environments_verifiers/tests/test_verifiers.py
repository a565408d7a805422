"""A taskset of verifiers from a third-party wheel, in the interpreter that `make proofs` sets up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import Drawn, draw
from hatchling.builders.wheel import WheelBuilder

from dovetail.interfaces import Failure, FailureKind, PluginContext, RolloutRequest
from dovetail_environments import EnvironmentProcessError
from dovetail_environments.config import EnvironmentRowsConfig, EnvironmentsConfig
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_environments.rows import EnvironmentRows
from dovetail_environments_verifiers.config import VerifiersConfig
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML

PYTHON = Path(__file__).parents[3] / ".venv-verifiers" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="verifiers is not installed here; `make proofs` has it"
)
TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "8":
            raise RuntimeError("no judge for this one")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum]):
    def load(self):
        for a in range(5):
            for b in range(5):
                yield Sum(SumData(prompt=f"{a} + {b} = ?", answer=str(a + b)), self.config.task)


__all__ = ["Sums"]
"""
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "stranger-sums"
version = "1.0"

[tool.hatch.build.targets.wheel]
packages = ["stranger_sums"]
"""

proof = pytest.mark.proofs
"""Mark of a test that needs verifiers."""


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the wheel, and install it on the interpreter's path."""
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "stranger_sums").mkdir(parents=True)
    (source / "stranger_sums" / "__init__.py").write_text(TASKSET)
    (source / "pyproject.toml").write_text(PYPROJECT)
    [wheel] = WheelBuilder(str(source)).build(directory=str(tmp_path), versions=["standard"])
    options = ("--quiet", "--no-deps", "--no-index", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True)
    monkeypatch.setenv("PYTHONPATH", str(site))


def section(**settings: Any) -> VerifiersConfig:
    given = {
        "taskset": "stranger-sums",
        "python": str(PYTHON),
        "workers": 2,
        "start_seconds": 600.0,
        **settings,
    }
    return VerifiersConfig(name="verifiers", **given)


def rows_of(config: VerifiersConfig, path: str = "sums") -> Any:
    rows = EnvironmentRowsConfig(name="environments", environments={"sums": config})
    return EnvironmentRows(rows, PluginContext()).read([path])


def answer(request: RolloutRequest, prompt: str) -> str:
    """Answer the sum in a prompt; one too many if the prompt contains a 3."""
    a, b = re.findall(r"(\d) \+ (\d) = \?", prompt)[-1]
    return str(int(a) + int(b) + (a == "3"))


def played(config: VerifiersConfig, row: Any, n: int) -> Drawn:
    loop_config = EnvironmentsConfig(name="environments", environments={"sums": config})
    loop = EnvironmentsLoop(loop_config, PluginContext(tokenizer=template_tokenizer(CHATML)))
    loop.start()
    try:
        return draw(loop, answer, n=n, messages=row["prompt"], extra_info=row["extra_info"])
    finally:
        loop.close()


@proof
@pytest.mark.usefixtures("taskset")
def test_fifty_episodes_are_scored_by_the_taskset_and_trained_on_as_served() -> None:
    config = section(tasks=20)
    rows = rows_of(config)
    assert [row["prompt"][0]["content"] for row in rows[:3]] == [
        "0 + 0 = ?",
        "0 + 1 = ?",
        "0 + 2 = ?",
    ]
    rewards = []
    for row in rows[13:18]:  # the sums 2 + 3 to 3 + 2
        drawn = played(config, row, 10)
        drawn.audit()
        for sample in drawn.samples:
            assert sample.trajectory is not None, sample.outcome
            output = sample.trajectory.output
            assert output["parts"] == {"turns": 1.0, "right": output["reward"], "letters": 1.0}
            assert len(sample.sequences) == 1
            rewards.append(output["reward"])
    assert rewards == [1.0] * 20 + [0.0] * 30


@proof
@pytest.mark.usefixtures("taskset")
def test_what_verifiers_notes_as_an_error_is_a_failure_and_no_score() -> None:
    config = section(tasks=25)
    drawn = played(config, rows_of(config)[24], 1)
    assert isinstance(drawn.sample.outcome, Failure)
    assert drawn.sample.outcome.kind is FailureKind.ENVIRONMENT
    assert "no judge" in drawn.sample.outcome.message


@proof
@pytest.mark.usefixtures("taskset")
def test_held_out_tasks_are_those_behind_the_training_ones() -> None:
    config = section(tasks=20, held_out=9)
    held_out = rows_of(config, "sums/held_out")
    assert [row["prompt"][0]["content"] for row in held_out] == [f"4 + {b} = ?" for b in range(5)]
    assert [row["reward_model"]["ground_truth"] for row in held_out] == list("45678")


@proof
def test_a_taskset_that_is_not_installed_is_named() -> None:
    with pytest.raises(EnvironmentProcessError, match="'no-such-taskset' not found"):
        rows_of(section(taskset="no-such-taskset"))


def test_a_taskset_has_to_be_named() -> None:
    with pytest.raises(ValueError, match="gsm8k-v1"):
        VerifiersConfig(name="verifiers")
