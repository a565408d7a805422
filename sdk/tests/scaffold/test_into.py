"""`plugins new --into`: adds plugins to an existing package, whose other plugins still work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.errors import PluginError
from dovetail_sdk.scaffold import add_plugin, new_plugin

SUITES = """
from dovetail_into_first.second.plugin import Second
from dovetail_sdk.check.suites import suites_for
print(*suites_for(Second, "reward_function", "dovetail_into_first"))
"""


def run(package: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(package: Path) -> dict[Path, bytes]:
    files = (p for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc")
    return {p: p.read_bytes() for p in files}


def test_a_second_plugin_lives_beside_the_first(tmp_path: Path) -> None:
    package = new_plugin("reward_function", "into_first", tmp_path)
    before = tomllib.loads((package / "pyproject.toml").read_text())
    for kind, name in (("reward_function", "second"), ("advantage", "third"), ("cli", "fourth")):
        done = CliRunner().invoke(main, ["plugins", "new", kind, name, "--into", str(package)])
        assert done.exit_code == 0, done.output
    after = tomllib.loads((package / "pyproject.toml").read_text())
    groups = after["project"].pop("entry-points")
    del before["project"]["entry-points"]
    assert after == before
    assert groups == {
        "dovetail.reward_function": {
            "into_first": "dovetail_into_first.plugin:IntoFirst",
            "second": "dovetail_into_first.second.plugin:Second",
        },
        "dovetail.advantage": {"third": "dovetail_into_first.third.plugin:Third"},
        "dovetail.cli": {"fourth": "dovetail_into_first.fourth.plugin:fourth"},
    }
    [manifest] = package.glob("src/*/dovetail-plugin.json")
    assert {p["name"] for p in json.loads(manifest.read_text())["plugins"]} == {
        "into_first", "second", "third"
    }  # fmt: skip
    run(package, "-m", "ruff", "check", "--no-cache", ".")
    run(package, "-m", "ruff", "format", "--check", "--no-cache", ".")
    own = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:jaxtyping")
    assert "passed" in own
    assert {file.name for file in (package / "tests").glob("test_*.py")} == {
        "test_conformance.py",
        "test_second_conformance.py",
        "test_third_conformance.py",
        "test_fourth_command.py",
    }
    assert run(package, "-c", SUITES).split() == ["TestSecond"]


def test_the_next_step_starts_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = new_plugin("reward_function", "into_here", tmp_path)
    monkeypatch.chdir(package)
    done = CliRunner().invoke(main, ["plugins", "new", "reward_function", "other", "--into", "."])
    assert done.output.endswith("next:\n  pip install -e '.[test]' && pytest\n"), done.output


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    package = new_plugin("advantage", "into_kept", tmp_path)
    (package / "src" / "dovetail_into_kept" / "mine").mkdir()
    (package / "src" / "dovetail_into_kept" / "mine" / "plugin.py").write_text("")
    before = contents(package)
    for kind, name, words in (
        ("advantage", "into_kept", "entry point 'into_kept' in the group dovetail.advantage"),
        ("advantage", "mine", "already contains mine"),
        ("advantage", "config", r"already contains config\.py"),
        ("advntage", "other", "unknown kind of plugin 'advntage'"),
    ):
        with pytest.raises(PluginError, match=words):
            add_plugin(kind, name, package)
    assert contents(package) == before
    with pytest.raises(PluginError, match=r"has no pyproject\.toml"):
        add_plugin("advantage", "other", tmp_path / "nowhere")


@pytest.mark.parametrize(
    "given", [("--licence", "MIT"), ("--directory", "elsewhere"), ("--repository",)]
)
def test_what_a_package_has_can_not_be_asked_for(tmp_path: Path, given: tuple[str, ...]) -> None:
    arguments = ["plugins", "new", "advantage", "x", "--into", str(tmp_path), *given]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert f"{given[0]} can't be combined with --into" in done.output


def test_comments_and_another_layout_of_entry_points_stay(tmp_path: Path) -> None:
    package = new_plugin("advantage", "into_dotted", tmp_path)
    file = package / "pyproject.toml"
    text = file.read_text()
    table = '[project.entry-points."dovetail.advantage"]\ninto_dotted = '
    dotted = '# Ours.\n[project.entry-points]\n"dovetail.advantage".into_dotted = '
    assert table in text
    file.write_text(text.replace(table, dotted))
    for kind, name in (("advantage", "second"), ("reward_function", "third")):
        add_plugin(kind, name, package)
    groups = tomllib.loads(file.read_text())["project"]["entry-points"]
    assert {group: list(entries) for group, entries in groups.items()} == {
        "dovetail.advantage": ["into_dotted", "second"],
        "dovetail.reward_function": ["third"],
    }
    assert set(text.replace(table, dotted).splitlines()) < set(file.read_text().splitlines())


def test_a_package_whose_manifest_can_not_be_derived_is_as_it_was(tmp_path: Path) -> None:
    package = new_plugin("advantage", "into_broken", tmp_path)
    shutil.rmtree(package / "tests")
    file = package / "pyproject.toml"
    ghost = '\nghost = "dovetail_into_broken.ghost:Ghost"\ninto_broken ='
    file.write_text(file.read_text().replace("\ninto_broken =", ghost))
    before = contents(package)
    with pytest.raises(PluginError, match="ghost"):
        add_plugin("advantage", "second", package)
    assert contents(package) == before
    assert not (package / "tests").exists()


def test_line_endings_of_a_file_stay_as_they_are(tmp_path: Path) -> None:
    package = new_plugin("advantage", "into_windows", tmp_path)
    file = package / "pyproject.toml"
    before = file.read_bytes().replace(b"\n", b"\r\n")
    file.write_bytes(before)
    add_plugin("reward_function", "second", package)
    lines = file.read_bytes().split(b"\n")
    assert all(line.endswith(b"\r") for line in lines[:-1])
    assert set(before.split(b"\n")) < set(lines)
