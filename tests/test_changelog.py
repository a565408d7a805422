"""CHANGELOG.md is built from the change fragments of all packages, and a misnamed fragment is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).with_name("changelog.py")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a changelog and a fragment in each of two packages."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "changelog.py").write_text(BUILD.read_text())
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n<!-- towncrier release notes start -->\n\n## 0.1.0\n\n- The first.\n"
    )
    for name, text in {
        "core/changes/7.eval.added.md": "The command `eval`,\nwith intervals.\n",
        "core/changes/8.eval.added.md": "Another of the same topic.\n",
        "plugins/tools/changes/9.search.fixed.md": "An empty query is refused.\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    return tmp_path


def build(project: Path, *version: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the project."""
    command = [sys.executable, str(project / "tests" / "changelog.py"), *version]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_version_is_put_on_top_with_a_line_a_change_and_its_fragments_go(project: Path) -> None:
    assert build(project, "0.2.0").returncode == 0
    lines = [line for line in (project / "CHANGELOG.md").read_text().splitlines() if line]
    assert lines[2].startswith("## 0.2.0 (")
    assert lines[3:] == [
        "### core",
        "- Added: The command `eval`, with intervals.",
        "- Added: Another of the same topic.",
        "### plugins/tools",
        "- Fixed: An empty query is refused.",
        "## 0.1.0",
        "- The first.",
    ]
    assert not list(project.rglob("changes/*.md"))


def test_without_a_version_nothing_is_written(project: Path) -> None:
    before = (project / "CHANGELOG.md").read_text()
    done = build(project)
    assert "empty query" in done.stdout
    assert (project / "CHANGELOG.md").read_text() == before
    assert len(list(project.rglob("changes/*.md"))) == 3


@pytest.mark.parametrize("name", ["7.eval.md", "eval.new.md", "notes.txt"])
def test_a_fragment_whose_name_has_no_type_is_refused(project: Path, name: str) -> None:
    (project / "core" / "changes" / name).write_text("Text.\n")
    done = build(project, "0.2.0")
    assert done.returncode != 0
    assert name in done.stderr
    assert len(list(project.rglob("changes/*.md"))) == 3 + name.endswith(".md")


def test_the_fragments_of_this_repository_have_valid_names(root: Path) -> None:
    done = build(root)
    assert done.returncode == 0, done.stderr
