"""mini-swe-agent works on ten broken repositories, in the sandbox: it is trained on as served, and their tests score what it left."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import Result
from engines_here import needs
from gateway_episodes import Drawn, run_command

from dovetail.interfaces import RolloutRequest
from dovetail.telemetry import read_rows
from dovetail_rewards.sandbox import available_levels

pytestmark = pytest.mark.skipif(
    not any(level.available for level in available_levels()[:2]),
    reason=f"no sandbox here: {'; '.join(f'{r.level}: {r.detail}' for r in available_levels())}",
)
CALL = "<tool_call>\n%s\n</tool_call>"


@pytest.fixture
def example(root: Path) -> SimpleNamespace:
    """The files of the example."""
    folder = root / "examples" / "repositories"
    files = {name: runpy.run_path(str(folder / f"{name}.py")) for name in ("prepare", "reward")}
    return SimpleNamespace(
        folder=folder, **files["prepare"], compute_score=files["reward"]["compute_score"]
    )


def rows(example: SimpleNamespace) -> dict[str, dict[str, Any]]:
    return {name: example.row(name, broken) for name, broken in example.PACKAGES.items()}


def score(example: SimpleNamespace, row: Mapping[str, Any], files: Mapping[str, str]) -> float:
    truth = row["reward_model"]["ground_truth"]
    return float(example.compute_score(truth, {"output": {"files": files}})["score"])


def test_tests_tell_the_right_package_from_the_broken_one(example: SimpleNamespace) -> None:
    for name, row in rows(example).items():
        broken = row["extra_info"]["files"]
        assert score(example, row, broken) == 0, name
        right = {**broken, f"{name}/__init__.py": example.PACKAGES[name].source}
        assert score(example, row, right) == 1, name
    assert len(example.PACKAGES) == 10


@pytest.mark.parametrize(
    "tampering",
    [
        {"slugs/__init__.py": "import os; os._exit(0)"},
        {"slugs/__init__.py": "import sys; print('tests 2 2'); sys.exit(0)"},
        {"tests/test_slugs.py": "", "unittest.py": "raise SystemExit(0)"},
        {},
    ],
)
def test_what_is_no_repair_has_no_point(
    example: SimpleNamespace, tampering: Mapping[str, str]
) -> None:
    row = rows(example)["slugs"]
    assert (
        score(example, row, {**row["extra_info"]["files"], **tampering} if tampering else {}) == 0
    )


def working(name: str, source: str | None) -> Callable[[RolloutRequest, str], str]:
    """A policy that looks, repairs the package or does something else, runs the tests, and submits; its first turn has two calls."""
    work = f"cat > {name}/__init__.py <<'END'\n{source}END"
    if source is None:
        work = "touch notes.txt; python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1\")'"

    def say(request: RolloutRequest, _prompt: str) -> str:
        commands = [
            ["ls", f"cat {name}/__init__.py"],
            [work],
            ["python3 -m unittest discover -s tests -t . 2>&1 | tail -3"],
            ["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"],
        ][min(request.streams[0].turn, 3)]
        calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
        return "I see.\n" + "\n".join(CALL % json.dumps(call) for call in calls)

    return say


@pytest.mark.proofs
@needs("minisweagent")
@pytest.mark.timeout(1800)
def test_mini_swe_agent_is_trained_on_as_served_and_scored_by_the_tests(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    config = yaml.safe_load((example.folder / "config.yaml").read_text())
    drawn: dict[str, Drawn] = {}
    for number, (name, row) in enumerate(rows(example).items()):
        repairs = number % 2 == 1
        drawn[name] = run_command(
            [sys.executable, str(example.folder / "agent.py")],
            working(name, example.PACKAGES[name].source if repairs else None),
            tmp_path,
            tokens=40_000,
            messages=row["prompt"],
            extra_info=row["extra_info"],
            environment=config["rollout"]["agent_loop"]["environment"],
        )
        drawn[name].audit()
        sample = drawn[name].sample
        assert sample.trajectory is not None, sample.outcome
        left = sample.trajectory.output
        assert left["exit_status"] == "Submitted"
        assert ("notes.txt" in left["files"]) is not repairs
        assert score(example, row, left["files"]) == repairs
        (tested,) = sample.trajectory.turns[2].observed
        assert ("OK" in tested["content"]) is repairs
    samples = [sample for one in drawn.values() for sample in one.samples]
    trained = sum(int(s.produced_T.sum()) for sample in samples for s in sample.sequences)
    produced = sum(len(made.response_ids) for one in drawn.values() for _, made in one.calls)
    sequences = sum(len(sample.sequences) for sample in samples)
    sys.stdout.write(
        f"mini-swe-agent: {len(samples)} episodes, {sum(len(one.calls) for one in drawn.values())} calls; "
        f"sequences an episode {sequences / len(samples):.2f}, tokens trained / produced {trained / produced:.3f}\n"
    )
    assert (sequences, trained) == (len(samples), produced)


@pytest.mark.proofs
@needs("minisweagent")
@pytest.mark.timeout(1800)
def test_a_run_of_the_example_scores_what_a_model_that_repairs_nothing_leaves(
    root: Path,
    tiny_with_tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inside: Callable[..., Result],
) -> None:
    """The commands of the example, with a random model."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(root / "examples")
    runpy.run_path("examples/repositories/prepare.py", run_name="__main__")
    inside(
        *("train", "examples/repositories/config.yaml", "trainer.total_steps=1", "rollout.n=2"),
        *(f"model.path={tiny_with_tools}", "model.dtype=float32", "rollout.name=hf"),
        *("model.override_config.max_position_embeddings=32768", "data.train_batch_size=3"),
        "rollout.agent_loop.max_turn_tokens=16",
        f"rollout.agent_loop.command='{sys.executable} examples/repositories/agent.py'",
    )
    (row,) = [
        r
        for r in read_rows(Path("runs/repositories/mini_swe_agent/metrics.jsonl"))
        if "reward/mean" in r
    ]
    assert row["reward/mean"] == 0
    assert row["reward/failures"] == 0
    assert row["episode/model_calls"] > 1
    # mini-swe-agent leaves out a turn that calls nothing.
    assert row["episode/further_sequences/other_history"] == row["episode/model_calls"] - 1
