"""A Harbor task in a folder, run without a container, in the interpreter that `make proofs` sets up."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import Drawn, draw

from dovetail.interfaces import EpisodeEnd, Failure, FailureKind, PluginContext
from dovetail_environments import EnvironmentProcessError
from dovetail_environments.config import EnvironmentRowsConfig, EnvironmentsConfig
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_environments.rows import EnvironmentRows
from dovetail_environments_harbor.config import HarborConfig
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML

PYTHON = Path(__file__).parents[3] / ".venv-harbor" / "bin" / "python"
NEEDED = pytest.mark.skipif(
    not PYTHON.exists(), reason="Harbor is not installed here; `make proofs` has it"
)


def proof(test: Any) -> Any:
    """Mark a test that needs Harbor."""
    return NEEDED(pytest.mark.proofs(test))


TASK = """
version = "1.0"
[agent]
timeout_sec = 0.001
[verifier]
timeout_sec = 60
"""
TESTS = """#!/bin/bash
if [ "$(cat /app/sorted.txt)" = "$(sort /app/words.txt)" ]; then right=1; else right=0; fi
echo "{\\"reward\\": $right, \\"lines\\": $(wc -l < /app/words.txt)}" > /logs/verifier/reward.json
"""
SORT = "I sort them.\n```bash\nsort words.txt > sorted.txt\n```"
DONE = "It is done."


def task(folder: Path, tests: str = TESTS) -> Path:
    """Write a task that asks to sort a file."""
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(TASK)
    (folder / "instruction.md").write_text("Sort words.txt into sorted.txt.")
    (folder / "environment" / "Dockerfile").write_text(
        "FROM debian\nWORKDIR /app\nCOPY words.txt .\n"
    )
    (folder / "environment" / "words.txt").write_text("pear\nfig\napple\n")
    (folder / "tests" / "test.sh").write_text(tests)
    return folder


def section(path: Path, **settings: Any) -> HarborConfig:
    given = {"runtime": "sandbox", "python": str(PYTHON), "workers": 2, "start_seconds": 600.0}
    return HarborConfig(name="harbor", folder=str(path), **{**given, **settings})


def rows_of(config: HarborConfig, path: str = "it") -> Any:
    rows = EnvironmentRowsConfig(name="environments", environments={"it": config})
    return EnvironmentRows(rows, PluginContext()).read([path])


def drawn(config: HarborConfig, policy: Callable[..., str], n: int = 1, **limits: Any) -> Drawn:
    loop_config = EnvironmentsConfig(name="environments", environments={"it": config}, **limits)
    loop = EnvironmentsLoop(loop_config, PluginContext(tokenizer=template_tokenizer(CHATML)))
    [row] = rows_of(config)
    loop.start()
    try:
        return draw(loop, policy, n=n, messages=row["prompt"], extra_info=row["extra_info"])
    finally:
        loop.close()


def saying(*turns: str) -> Callable[..., str]:
    return lambda request, _: turns[min(request.streams[0].turn, len(turns) - 1)]


@proof
def test_a_task_passes_when_solved_and_fails_when_not(tmp_path: Path) -> None:
    config = section(task(tmp_path / "sort"))

    def policy(request: Any, _: str) -> str:
        """Solve the task in every second sample."""
        if request.streams[0].turn:
            return DONE
        return SORT if request.streams[0].sample % 2 else SORT.replace("sort words", "cat words")

    found = drawn(config, policy, n=4)
    found.audit()
    outputs = [each.trajectory.output for each in found.samples if each.trajectory]
    assert [output["reward"] for output in outputs] == [0.0, 1.0, 0.0, 1.0]
    assert all(output["parts"] == {"lines": 3, "turns": 2} for output in outputs)
    assert all(len(sample.sequences) == 1 for sample in found.samples)


@proof
def test_the_policy_sees_what_commands_print_and_what_takes_too_long(tmp_path: Path) -> None:
    prompts: list[str] = []

    def policy(request: Any, prompt: str) -> str:
        prompts.append(prompt)
        commands = [
            "echo fig >&2; seq 9999; exit 3",
            "sleep 60",
            "ls /var /etc/passwd 2>&1 | grep -c 'No such'; ls /",
        ]
        turn = request.streams[0].turn
        return f"```sh\n{commands[turn]}\n```" if turn < len(commands) else DONE

    found = drawn(
        section(task(tmp_path / "sort"), command_seconds=2, output_characters=100), policy
    )
    assert found.sample.trajectory is not None, found.sample.outcome
    assert found.sample.trajectory.output["parts"]["turns"] == 4
    last = prompts[-1]
    assert "1\n2\n3" in last
    assert "[…]" in last
    assert "fig\n[exit status 3]" in last
    assert "[ended after 2 s]" in last
    assert "user\n2\napp\n" in last  # neither file exists


@proof
def test_at_a_limit_the_tests_score_what_is_there(tmp_path: Path) -> None:
    found = drawn(section(task(tmp_path / "sort"), at_limit=-1.0), saying(SORT), max_turns=2)
    assert found.sample.trajectory is not None, found.sample.outcome
    assert found.sample.trajectory.end is EpisodeEnd.TURNS
    assert found.sample.trajectory.output["reward"] == 1.0


@proof
@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt", "Non-finite reward"),
        ("#!/bin/bash\necho good > /logs/verifier/reward.txt", "Failed to parse"),
        ("#!/bin/bash\necho '{\"form\": 1}' > /logs/verifier/reward.json", "key `reward`"),
        ("#!/bin/bash\nexit 0", "No reward file"),
    ],
    ids=["nan", "text", "other", "none"],
)
def test_tests_without_a_finite_reward_are_a_failure_and_no_score(
    tmp_path: Path, tests: str, message: str
) -> None:
    outcome = drawn(section(task(tmp_path / "sort", tests)), saying(DONE)).sample.outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.ENVIRONMENT
    assert message in outcome.message


@proof
def test_a_policy_that_ends_its_sandbox_has_failed_and_the_next_episode_is_scored(
    tmp_path: Path,
) -> None:
    config = section(task(tmp_path / "sort"), workers=1)

    def policy(request: Any, _: str) -> str:
        if request.streams[0].turn:
            return DONE
        return SORT if request.streams[0].sample else "```bash\nkill -9 -1\n```"

    failed, scored = drawn(config, policy, n=2).samples
    assert isinstance(failed.outcome, Failure)
    assert failed.outcome.kind is FailureKind.ENVIRONMENT
    assert "sandbox" in failed.outcome.message
    assert scored.trajectory is not None
    assert scored.trajectory.output["reward"] == 1.0


@proof
def test_a_runtime_that_is_not_there_is_a_failure_that_names_it(tmp_path: Path) -> None:
    outcome = drawn(section(task(tmp_path / "sort"), runtime="podman"), saying(DONE)).sample.outcome
    assert isinstance(outcome, Failure)
    assert re.search("(?i)podman", outcome.message)


@proof
def test_tasks_are_folders_by_name_and_held_out_are_those_behind(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        task(tmp_path / "tasks" / name)
    config = section(tmp_path / "tasks", tasks=2, held_out=5)
    assert [Path(row["extra_info"]["task"]["folder"]).name for row in rows_of(config)] == ["a", "b"]
    [held_out] = rows_of(config, "it/held_out")
    assert Path(held_out["extra_info"]["task"]["folder"]).name == "c"
    assert held_out["prompt"][-1]["content"] == "Sort words.txt into sorted.txt."
    with pytest.raises(EnvironmentProcessError, match=shlex.quote(str(tmp_path / "nothing"))):
        rows_of(section(tmp_path / "nothing"))


def test_an_interpreter_without_harbor_is_told_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProcessError) as caught:
        rows_of(HarborConfig(name="harbor", folder=str(tmp_path)))
    assert "harbor<0.27,>=0.26 (not installed)" in str(caught.value)
    assert "-m pip install 'harbor>=0.26,<0.27'" in str(caught.value.hint)


def test_a_folder_has_to_be_named() -> None:
    with pytest.raises(ValueError, match="`folder` is empty"):
        HarborConfig(name="harbor")
