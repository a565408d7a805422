"""Environments: the pages' own are trained in, mixed by weight, with figures by environment; `eval` runs them with a checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

import dovetail
from dovetail.config import config_from_mapping
from dovetail.telemetry import read_rows

CODE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def environments(config: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config with the two environments of the page on environments, in a folder with their files."""
    text = (root / "docs" / "environments.md").read_text()
    files = dict(CODE.findall(text))
    assert files.keys() == {"hotter.py", "sums.py"}
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    document = yaml.safe_load(config.read_text())
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    given = [block["rollout"]["agent_loop"]["environments"] for block in blocks]
    [hotter] = [block["hotter"] for block in given if "hotter" in block]
    [sums] = [block["sums"] for block in given if "sums" in block]
    document["rollout"]["agent_loop"] = {
        "name": "environments",
        "environments": {
            "hotter": {**hotter, "tasks": 12, "weight": 1, "workers": 2},
            "sums": {**sums, "weight": 3},
        },
    }
    for key in ("train_files", "val_files"):
        del document["data"][key]
    del document["reward"]
    document["data"]["max_response_length"] = 60
    document["trainer"] = {"total_steps": 2, "samples_per_step": -1}
    config.write_text(yaml.safe_dump(document))
    return config


def test_a_run_mixes_environments_by_weight_and_has_figures_of_each(
    environments: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    summary = dovetail.train(environments)
    directory = Path(summary["directory"])
    steps = [row for row in read_rows(directory / "metrics.jsonl") if "reward/mean" in row]
    assert len(steps) == 2
    for row in steps:
        shares = {name: row[f"data/{name}/prompt_share"] for name in ("hotter", "sums")}
        assert shares == {"hotter": 0.25, "sums": 0.75}
        assert row["episode/environments/hotter/episodes"] == 0.25
        assert row["reward/failures"] == 0
        mean = sum(row[f"reward/components/{name}/reward"] * shares[name] for name in shares)
        assert mean == pytest.approx(row["reward/mean"], abs=1e-6)
    validated = next(row for row in read_rows(directory / "metrics.jsonl") if "val/mean@1" in row)
    assert {"val/hotter/mean@1", "val/sums/mean@1"} <= validated.keys()
    samples = read_rows(directory / "samples" / "step_1.jsonl")
    assert {row["data_source"] for row in samples} == {"hotter", "sums"}
    out = tmp_path / "out.jsonl"
    inside("eval", str(directory), "--samples", str(out))
    evaluated = read_rows(out)
    assert sorted(row["data_source"] for row in evaluated) == ["hotter"] * 4 + ["sums"] * 5
    assert all("failure" not in row for row in evaluated)


@pytest.mark.timeout(600)
def test_environments_on_ray_make_the_rewards_that_they_make_in_one_process(
    environments: Path, tmp_path: Path
) -> None:
    """Their processes run beside the run's own; the policy answers from processes of Ray."""
    dovetail.train(environments, ["experiment=inline"])
    command = [sys.executable, "-m", "dovetail", "train", str(environments), "experiment=ray"]
    command += ["runtime.name=ray", "runtime.workers_per_node=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rollout × 2" in done.stdout
    [inline] = tmp_path.glob("runs/*/inline")
    first = [
        next(row for row in read_rows(run / "metrics.jsonl") if "reward/mean" in row)
        for run in (inline, inline.with_name("ray"))
    ]
    same = [name for name in first[0] if name.startswith(("reward/", "episode/environments/"))]
    assert "reward/components/hotter/reward" in same
    assert {name: first[1][name] for name in same} == pytest.approx(
        {name: first[0][name] for name in same}, rel=1e-5
    )


def test_every_config_of_the_page_is_a_valid_one(environments: Path, root: Path) -> None:
    assert environments.is_file()
    text = (root / "docs" / "environments.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    assert len(blocks) >= 6
    for block in blocks:
        loaded = config_from_mapping({"model": {"path": "tiny"}, **block}).config
        named = loaded.rollout.agent_loop.environments
        assert loaded.data.mixture.keys() == loaded.data.source.environments.keys() == named.keys()
        assert loaded.reward.function.name == "environment"


def test_check_names_the_line_that_installs_what_is_missing(
    environments: Path, inside: Callable[..., Result]
) -> None:
    missing = "rollout.agent_loop.environments.hotter.python=.venv-hotter/bin/python"
    result = inside("check", str(environments), missing, check=False)
    assert ".venv-hotter" in result.output
    assert "python3 -m venv .venv-hotter" in result.output


def test_the_scaffold_writes_an_environment_that_passes_its_own_suite(tmp_path: Path) -> None:
    from dovetail_sdk.scaffold import new_plugin

    package = new_plugin("environment", "twice", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=package,
        env={"PYTHONPATH": str(package / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
