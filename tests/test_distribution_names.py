"""What a reader is told to install is this project: `dovetail` on the package index is another one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PLACES = ("README.md", "CONTRIBUTING.md", "Makefile", "docs", "examples", "benchmarks", "core", "sdk", "plugins")  # fmt: skip
TEXTS = {".md", ".py", ".jinja", ".toml", ".yaml", ".yml", ".sbatch", ".sh", ".txt", ".json", ""}

JOINED = re.compile(r"\\\n|[\"']\s*\n\s*f?[\"']")
"""A command continued on the next line, or a string of Python in several pieces."""
COMMAND = re.compile(r"\b(?:pip|pipx|uv) (?:install|add)\b([^\n`;|&#]*)", re.IGNORECASE)
STRAY = re.compile(r"(?<![\w.$/=-])dovetail(?![\w-]|\.\w|/)", re.IGNORECASE)
PROSE = re.compile(r"[,.:)] |\b(?:and|or|then|brings)\b")
REQUIREMENT = re.compile(r"[\"']dovetail\s*(?:\[|[<>=~!@])", re.IGNORECASE)
"""As it stands in a list: `dependencies = ["dovetail[ray]>=0.1"]`."""


def strays(text: str) -> list[str]:
    """Commands and requirements that would fetch the other project."""
    text = JOINED.sub("", text)
    commands = [
        match[0] for match in COMMAND.finditer(text) if STRAY.search(PROSE.split(match[1])[0])
    ]
    return commands + [match[0] for match in REQUIREMENT.finditer(text)]


@pytest.mark.parametrize(
    "text",
    [
        "pip install dovetail",
        "pip install -U --pre Dovetail dovetail-sdk",
        "/opt/python -m pip install dovetail-core 'dovetail-rollout-vllm[engine]' dovetail",
        "pip install dovetail-sdk \\\n    dovetail",
        'hint="pip install dovetail-core "\n    "dovetail",',
        "uv add dovetail",
        'dependencies = ["numpy", "dovetail>=0.1"]',
    ],
)
def test_a_command_that_fetches_the_other_project_is_found(text: str) -> None:
    assert strays(text)


def test_no_page_example_template_or_error_installs_the_other_project(root: Path) -> None:
    files = [file for place in PLACES for file in (root / place).rglob("*") if file.is_file()]
    files += [root / place for place in PLACES if (root / place).is_file()]
    texts = [file for file in files if file.suffix in TEXTS]
    assert {"README.md", "Makefile", "README.md.jinja", "index.py"} <= {file.name for file in texts}
    found = {
        str(file.relative_to(root)): strays(file.read_text(errors="replace")) for file in texts
    }
    assert {name: commands for name, commands in found.items() if commands} == {}


def test_no_distribution_of_ours_has_the_name_or_depends_on_it(root: Path) -> None:
    for file in [root / "pyproject.toml", *root.glob("*/pyproject.toml"), *root.glob("plugins/*/pyproject.toml")]:  # fmt: skip
        project = tomllib.loads(file.read_text())["project"]
        wanted = list(project.get("dependencies", ()))
        for extra in project.get("optional-dependencies", {}).values():
            wanted += extra
        names = {re.split(r"[^\w.-]", need)[0].lower() for need in [project["name"], *wanted]}
        assert "dovetail" not in names, file
