"""The examples of tasks with tools and turns: their commands run as docs/agents.md shows them, and the policies learn."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.config import config_from_mapping
from dovetail.interfaces import PluginContext
from dovetail_agents.tool_agent import ToolAgent
from dovetail_diagnosis import diagnose
from dovetail_rewards.config_code import CodeConfig
from dovetail_rewards.functions.code import Code
from dovetail_rewards.sandbox import available_levels
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance import AgentLoopConformance

needs_sandbox = pytest.mark.skipif(
    not any(level.available for level in available_levels()[:2]),
    reason=f"no sandbox here: {'; '.join(f'{r.level}: {r.detail}' for r in available_levels())}",
)


def run_as_shown(root: Path, folder: Path, example: str, *further: str) -> Path:
    """Run the commands of docs/agents.md that name an example, in a folder of their own.

    Args:
        root: of the repository.
        folder: in which they run.
        example: the folder of the example.
        further: overrides of every `dovetail` command.

    Returns:
        The folder of its runs.
    """
    page = (root / "docs" / "agents.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if f"examples/{example}/" in block]
    (folder / "examples").symlink_to(root / "examples")
    for line in block.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        arguments = ["-m", "dovetail", *arguments, *further] if program == "dovetail" else arguments
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=folder
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "runs" / example


def accuracies(run: Path) -> tuple[float, float]:
    """The share of held-out prompts that were right before training and after it."""
    summary = json.loads((run / "summary.json").read_text())
    return summary["accuracy_before"], summary["accuracy_after"]


def warnings_of(run: Path) -> list[str]:
    """What the diagnosis of a run that learned says against it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [warning.name for warning in diagnose(rows).warnings]


def prepared(root: Path) -> Mapping[str, Any]:
    return runpy.run_path(str(root / "examples" / "fix_code" / "prepare.py"))


def judged(source: str, tests: list[str]) -> float:
    function = Code(CodeConfig(time_limit=1.0), PluginContext())
    return float(function.compute_score(None, f"```python\n{source}\n```", {"tests": tests})["score"])  # fmt: skip


@needs_sandbox
def test_every_function_to_fix_passes_its_asserts_before_it_is_broken(root: Path) -> None:
    for source, tests in prepared(root)["FUNCTIONS"].items():
        assert judged(source, tests) == 1.0, source


@needs_sandbox
def test_a_policy_sees_the_bug_by_running_the_function_and_its_fix_scores(root: Path) -> None:
    document = yaml.safe_load((root / "examples" / "fix_code" / "config.yaml").read_text())
    example = prepared(root)
    source, tests = next(iter(example["FUNCTIONS"].items()))
    bug = next(bug for bug in example["broken"](source) if judged(bug, tests) == 0.0)
    call = {"name": "python", "arguments": {"code": f"{bug}\n" + "\n".join(tests)}}
    said = f"<tool_call>{json.dumps(call)}</tool_call>", f"Fixed:\n```python\n{source}\n```"
    members = {
        "plugin": ToolAgent,
        "config": config_from_mapping(document, (), name="config.yaml").config.rollout.agent_loop,
        "turns": said,
        "__module__": __name__,
    }
    (sample,) = type("Drawn", (AgentLoopConformance,), members)().draw(1)
    assert sample.trajectory is not None
    [first, last] = sample.trajectory.turns
    assert "AssertionError" in str(first.observed[0]["content"])
    assert not last.observed
    truth = example["row"](bug, tests)["reward_model"]["ground_truth"]
    function = Code(CodeConfig(time_limit=1.0), PluginContext())
    assert function.compute_score(None, sample.text, truth)["score"] == 1.0


@pytest.mark.nightly
@needs_sandbox
def test_the_commands_that_fix_code_run_with_a_tiny_model(
    root: Path, tiny: Path, tmp_path: Path
) -> None:
    runs = run_as_shown(
        *(root, tmp_path, "fix_code", f"model.path={tiny}", "model.dtype=float32"),
        *(f"model.chat_template={json.dumps(CHATML)}", "data.max_prompt_length=2000"),
        *("data.train_batch_size=2", "rollout.n=2", "data.max_response_length=8"),
        "trainer.total_steps=1",
    )
    summary = json.loads((runs / "grpo" / "summary.json").read_text())
    assert summary["status"] == "completed"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_policy_learns_to_use_two_tools_and_is_lost_without_one(
    root: Path, tmp_path: Path
) -> None:
    runs = run_as_shown(root, tmp_path, "two_tools")
    before, after = accuracies(runs / "grpo")
    assert after >= before + 0.3
    assert warnings_of(runs / "sft") == warnings_of(runs / "grpo") == []
    [barred] = [json.loads(line) for line in (runs / "no_search.jsonl").read_text().splitlines()]
    assert barred["metrics"]["val/mean@1"] < 0.2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_rewards_of_turns_teach_a_game_from_random_weights(root: Path, tmp_path: Path) -> None:
    runs = run_as_shown(root, tmp_path, "guess", "trainer.total_steps=20")
    before, after = accuracies(runs / "turns")
    assert after >= before + 1.5
    assert warnings_of(runs / "turns") == []
