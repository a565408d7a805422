"""Core trains without the packages that show a run: console, diagnosis, rules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from dovetail.errors import ConfigError
from dovetail.plugins.index import PluginIndex, default_index

SHORT = ("trainer.total_steps=1", "data.val_files=[]")
ABSENT = {"dovetail-console", "dovetail-diagnosis", "dovetail-preflight"}


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process sees none of these packages."""
    found = default_index()
    without = dataclasses.replace(
        found,
        all_entries=tuple(e for e in found.all_entries if e.distribution not in ABSENT),
        distributions=tuple(d for d in found.distributions if d.name not in ABSENT),
    )
    monkeypatch.setattr(PluginIndex, "discover", lambda: without)
    default_index.cache_clear()
    yield
    default_index.cache_clear()


@pytest.mark.usefixtures("absent")
def test_a_run_trains_and_says_how_it_ended(
    config: Path, inside: Callable[..., Result], tmp_path: Path
) -> None:
    printed = inside("train", str(config), *SHORT).stdout
    run = tmp_path / "runs" / "tests" / "run"
    assert "run directory: " in printed
    assert f"{run}: completed, 1 of 1 steps" in printed
    *_, row = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1
    shown = inside("config", "show", str(config)).stdout
    assert "name: jsonl" in shown
    assert "console" not in shown
    missing = inside("runs", "list", check=False)
    assert missing.exit_code == 2
    assert "no command 'runs'" in missing.stderr
    assert "pip install dovetail-console" in missing.stderr


@pytest.mark.usefixtures("absent")
@pytest.mark.parametrize("tracking", ["tracking=[console]", "tracking[0].live=false"])
def test_a_console_that_is_asked_for_is_named_with_the_package_that_brings_it(
    config: Path, inside: Callable[..., Result], tracking: str
) -> None:
    refused = inside("train", str(config), *SHORT, tracking, check=False)
    assert refused.exit_code == ConfigError("").exit_code
    assert "plugin is named 'console'" in refused.stderr
    assert "pip install dovetail-console" in refused.stderr


@pytest.mark.usefixtures("absent")
def test_a_supervisor_that_is_asked_for_is_named_with_the_package_that_brings_it(
    config: Path, inside: Callable[..., Result], tmp_path: Path
) -> None:
    refused = inside("train", str(config), *SHORT, "trainer.run_restarts=3", check=False)
    assert refused.exit_code != 0
    assert "trainer.run_restarts" in refused.stderr
    assert "pip install dovetail-console" in refused.stderr
    assert not (tmp_path / "runs").exists()
