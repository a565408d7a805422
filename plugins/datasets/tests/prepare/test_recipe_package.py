"""`dovetail plugins new data_recipe`: a third-party package with a recipe, and a recipe in an existing package."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from dovetail_sdk.check.suites import suites_for
from dovetail_sdk.scaffold import add_plugin, new_plugin


def project_of(package: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return project


def test_a_new_recipe_passes_its_own_tests(tmp_path: Path) -> None:
    package = new_plugin("data_recipe", "capitals", tmp_path)
    assert "dovetail-datasets>=0.1" in project_of(package)["dependencies"]  # type: ignore[operator]
    done = subprocess.run(
        # Skip the test that the rows pass `dovetail data check`; this package's recipes have it.
        [sys.executable, "-m", "pytest", "-q", "-p", "no:jaxtyping", "-k", "not data_look"],
        cwd=package,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout


def test_a_recipe_in_a_package_brings_the_dependency_once(tmp_path: Path) -> None:
    package = new_plugin("reward_function", "shares", tmp_path)
    for name in ("first_rows", "second_rows"):
        add_plugin("data_recipe", name, package)
    assert project_of(package)["dependencies"] == ["dovetail-core>=0.1", "dovetail-datasets>=0.1"]


def test_plugins_check_finds_the_suite_of_the_kind() -> None:
    from dovetail_datasets.prepare.recipes.gsm8k import Gsm8kRecipe
    from dovetail_datasets.testing import DataRecipeConformance

    [suite] = suites_for(Gsm8kRecipe, "data_recipe", "dovetail_datasets").values()
    assert issubclass(suite, DataRecipeConformance)
