"""Commands that take every key from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def keys(config: Path) -> list[str]:
    """What the file says, as overrides."""
    document = yaml.safe_load(config.read_text())
    return [f"{key}={json.dumps(value)}" for key, value in document.items()]


def test_a_run_without_a_file_is_that_of_the_file(
    inside: Any, config: Path, keys: list[str], tmp_path: Path
) -> None:
    inside("train", str(config), "experiment=file")
    inside("train", *keys, "experiment=keys")
    runs = [tmp_path / "runs/tests" / name for name in ("file", "keys")]
    written = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in runs
    ]
    for one, other in zip(*written, strict=True):
        assert one.get("actor/loss") == other.get("actor/loss")
        assert one.get("actor/grad_norm") == other.get("actor/grad_norm")
    assert inside("plan", str(config)).stdout == inside("plan", *keys).stdout


def test_messages_speak_of_the_command_line(inside: Any, keys: list[str]) -> None:
    assert "command line" in inside("check", *keys).output
    found = inside("check", "rollout.n=4", check=False)
    assert found.exit_code == 2
    assert "the command line: 1 problem" in found.output
    assert "model.path: required" in found.output
    assert (
        "override #1 'rollout.n=4'"
        in inside("config", "explain", "rollout.n=4", "rollout.n").output
    )
    assert "override #1" in inside("config", "show", "rollout.n=4", *keys).output


def test_a_file_whose_name_has_an_equals_sign_is_a_file(
    inside: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = config.with_name("seed=5.yaml")
    named.write_text(config.read_text())
    monkeypatch.chdir(named.parent)
    assert "seed=5.yaml is" in inside("check", "seed=5.yaml").output


def test_sft_takes_keys_alone(inside: Any, tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} + 1 =", "response": str(a + 1)} for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inside(
        "sft",
        f"model.path={tiny}",
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        "data.train_batch_size=4",
        "trainer.total_steps=1",
        "model.dtype=float32",
        f"output_dir={tmp_path / 'runs'}",
    )
    assert (tmp_path / "runs/dovetail/default/final/config.json").is_file()
