"""The package that docs/writing-plugins.md shows is built, installed, checked, selected and trained with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

BLOCK = re.compile(r"```(\w*)\n(?:# ([\w./]+)[^\n]*\n)?(.*?)```", re.DOTALL)
PLUGINS = ("rollout/lockstep", "advantage/mean_deviation", "reward_function/closeness")
PACKAGE = "acme_dovetail"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def blocks(root: Path) -> list[tuple[str, str, str]]:
    """The page's blocks: language, the file that the first line names, the text below that line."""
    return BLOCK.findall((root / "docs" / "writing-plugins.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def commands(blocks: list[tuple[str, str, str]]) -> list[str]:
    """Every line that the page says to type."""
    return [line for language, _, text in blocks if not language for line in text.splitlines()]


@pytest.fixture(scope="module")
def package(
    blocks: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """The package's folder, and a way to run Python where its wheel is installed."""
    home = tmp_path_factory.mktemp("written")
    folder, site = home / "acme-dovetail", home / "site"
    for language, file, text in blocks:
        if language in ("python", "toml"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
    (folder / "src" / PACKAGE / "py.typed").touch()

    def run(*arguments: str, cwd: Path = home) -> str:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
            env={**inherited, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "dovetail_sdk", "manifest", ".", cwd=folder)
    [wheel] = WheelBuilder(str(folder)).build(directory=str(home), versions=["standard"])
    quiet = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run("-m", "pip", "install", *quiet, "--target", str(site), wheel)
    return folder, run


def test_every_block_is_tried(blocks: list[tuple[str, str, str]], commands: list[str]) -> None:
    for language, file, _ in blocks:
        assert bool(file) == bool(language), (language, file)
        assert language in ("", "python", "toml", "yaml")
    shown = [line for line in commands if not line.startswith("pip install")]
    assert shown == [
        "python -m dovetail_sdk manifest .",
        "pytest",
        *(f"dovetail plugins check {plugin}" for plugin in PLUGINS),
        "dovetail check config.yaml",
        "dovetail train config.yaml",
    ]


def test_its_own_tests_are_found_and_pass(package: tuple[Path, Run]) -> None:
    folder, run = package
    options = ("-v", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:jaxtyping")
    # The rest of the rollout's suite is what `plugins check` runs below, nightly.
    printed = run("-m", "pytest", *options, "-k", "not TestLockstep or torn", "tests", cwd=folder)
    for test in (
        "TestLockstep::test_a_torn_update_never_leaves_mixed_weights",
        "TestMeanDeviation::test_the_order_of_samples_does_not_matter",
        "TestCloseness::test_right_answers_score_above_wrong_ones",
    ):
        assert re.search(rf"{test}.* PASSED", printed), test


@pytest.mark.parametrize(
    "plugin", [pytest.param(PLUGINS[0], marks=pytest.mark.nightly), *PLUGINS[1:]]
)
def test_a_check_of_it_finds_nothing_and_earns_gold(package: tuple[Path, Run], plugin: str) -> None:
    report = json.loads(package[1]("-m", "dovetail.cli.main", "plugins", "check", plugin, "--json"))
    left = [item for item in (*report["checks"], *report["tests"]) if item["outcome"] == "failed"]
    assert left == []
    assert report["tier"] in ("gold", "platinum"), report["facts"]


@pytest.mark.nightly
def test_it_trains_when_it_is_selected_as_shown(
    package: tuple[Path, Run],
    blocks: list[tuple[str, str, str]],
    config: Path,
    tmp_path: Path,
) -> None:
    _, run = package
    document: dict[str, Any] = yaml.safe_load(config.read_text())
    [shown] = [yaml.safe_load(text) for language, _, text in blocks if language == "yaml"]
    document["algorithm"] |= shown.pop("algorithm")
    config.write_text(yaml.safe_dump(document | shown))
    run("-m", "dovetail.cli.main", "check", str(config))
    steps = ("trainer.total_steps=2", "trainer.validate_before=false")
    run("-m", "dovetail.cli.main", "train", str(config), *steps, cwd=tmp_path)
    [summary] = (tmp_path / "runs").glob("*/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "completed"
    lock = json.loads((summary.parent / "plugins.lock.json").read_text())
    ours = {f"{p['kind']}/{p['name']}" for p in lock["plugins"] if p["distribution"] == "acme-dovetail"}  # fmt: skip
    assert ours == set(PLUGINS)
