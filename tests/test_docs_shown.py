"""Every command and every config that the docs show: the command has these options, the config these keys with such values.

What a page shows is also run, by the test of the page: `test_readme.py`, `test_sft_page.py` and others.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from dovetail.cli.main import main
from dovetail.config import config_from_mapping
from dovetail.config.load import config_class_unrun
from dovetail.config.plain_yaml import YamlTextError, parse
from dovetail.config.schema import fields_of
from dovetail.errors import ConfigError
from dovetail.sections import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    page
    for page in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
    if "/changes/" not in page and (ROOT / page).is_file()
]  # fmt: skip
OVERRIDE = re.compile(r"[a-z_]+(\.\w+|\[\d+\])*=")
OF_THE_PAGE = {"docs/writing-plugins.md": "lockstep"}
"""Plugins that a page builds, whose configs no test without them can read."""


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each fenced block of a page."""
    language, lines = None, []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        fence = re.fullmatch(r" *```(\w*) *", line)
        if fence and language is None:
            language, lines = fence[1], []
        elif fence:
            yield str(language), "\n".join(lines)
            language = None
        elif language is not None:
            lines.append(line)


def commands(page: str) -> list[str]:
    """Return the commands `dovetail …` of a page, without comments."""
    found = []
    for language, text in blocks(page):
        if language in ("", "bash", "console", "sh"):
            for line in text.replace("\\\n", " ").splitlines():
                parts = re.split(r" && |; ", re.sub(r"\s#.*", "", line))
                found += [part.strip() for part in parts if part.strip().startswith("dovetail ")]
    return found


def configs(page: str) -> list[dict[str, Any]]:
    """Return the configs of a page: blocks of YAML with keys of a run; each line of a block whose lines are configs of their own."""
    found = []
    for language, text in blocks(page):
        if language != "yaml":
            continue
        try:
            mappings = [parse(text)[0]]
        except YamlTextError:
            mappings = [parse(line)[0] for line in text.splitlines() if line.strip()]
        found += [
            m for m in mappings if isinstance(m, dict) and m.keys() <= fields_of(RunConfig).keys()
        ]
    return found  # fmt: skip


def wrong(mapping: dict[str, Any], overrides: list[str]) -> list[str]:
    """Return what is wrong with a config, but for keys that only a plugin has which the reader's own config selects."""
    whole = {**mapping, "model": {"path": "tiny", **mapping.get("model", {})}}
    try:
        config_from_mapping(whole, overrides, resolver=config_class_unrun)
    except ConfigError as error:
        return [
            problem
            for problem in error.problems
            if not re.search(r"\bha(s|ve) this key\b", problem)
        ]
    return []


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_exist_with_these_options_and_keys(page: str) -> None:
    for shown in commands(page):
        words, command, context = shlex.split(shown)[1:], main, click.Context(main)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words.pop(0))
            assert found is not None, shown
            command, context = found, click.Context(found, parent=context)
        if isinstance(command, click.Group):
            continue
        given, _, _ = command.make_parser(context).parse_args([*words])
        values = [
            value
            for each in command.params
            if isinstance(each, click.Argument) and isinstance(given.get(each.name), list | tuple)
            for value in given[each.name]
        ]
        overrides = [value for value in values if OVERRIDE.match(value)]
        # What a recipe takes is its own, a sweep takes several values of a key; `--` begins the command of another system.
        if command.name not in ("prepare", "sweep") and "--" not in words:
            assert wrong({}, overrides) == [], shown


@pytest.mark.parametrize("page", [page for page in PAGES if configs(page)])
def test_the_configs_of_a_page_can_be_read(page: str) -> None:
    for config in configs(page):
        if OF_THE_PAGE.get(page, "-") not in str(config):
            assert wrong(config, []) == [], config


def test_a_key_that_does_not_exist_or_a_wrong_value_is_found() -> None:
    assert wrong({"trainer": {"total_step": 3}}, [])
    assert wrong({}, ["rollout.n=many"])
    assert wrong({}, ["rollout.gpu_memory_utilization=0.5"]) == []
