"""The rows, the reward and the config that the pages on data and rewards begin with work together, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail_sdk.testing import tiny_model_and_tokenizer


def first(page: Path, language: str) -> str:
    """Return the first block of a language on a page."""
    [text, *_] = re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    return text


def test_rows_of_ones_own_are_looked_at_scored_and_trained_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    docs = root / "docs"
    Path("sums.jsonl").write_text(first(docs / "datasets.md", "json"))
    Path("sums.yaml").write_text(first(docs / "datasets.md", "yaml"))
    Path("my_reward.py").write_text(first(docs / "rewards.md", "python"))
    model = f"model.path={tiny_model_and_tokenizer(tmp_path / 'model', vocab_size=300)}"
    small = ["trainer.total_steps=1", "runtime.device=cpu", "model.dtype=float32"]
    for command, words in (
        (["data", "look", "sums.yaml", model], "What is 17 + 25?"),
        (["reward", "try", "my_reward.py", "sums.jsonl"], "2 responses"),
        (["train", "sums.yaml", model, *small], "run directory"),
    ):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        assert words in done.output
    summary = json.loads(Path("runs/sums/first/summary.json").read_text())
    assert summary["status"] == "completed"
