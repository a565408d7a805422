"""A run with overrides of its model's config is the run on a model whose config.json was edited by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

RUN = (
    "algorithm.advantage=gae",
    "algorithm.kl.in_loss.coef=0.1",
    "rollout.weight_check.every=1",
    "algorithm.logprob_check.stop_above=0.001",
    "trainer.total_steps=2",
    "trainer.save_every=2",
)
THETA = 37.0


def figures(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    named = ("loss", "grad_norm", "kl", "entropy", "value_error", "approx_kl")
    return [{k: v for k, v in row.items() if k.endswith(named)} for row in rows]


@pytest.fixture
def edited(tiny: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "edited"
    shutil.copytree(tiny, directory)
    file = directory / "config.json"
    values = json.loads(file.read_text())
    values["rope_parameters"]["rope_theta"] = THETA
    file.write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize("actor", [(), ("actor.engine.lora.rank=2",)], ids=["whole", "adapter"])
def test_rollout_actor_critic_reference_and_export_have_the_override(
    inside: Any, config: Path, edited: Path, tmp_path: Path, actor: tuple[str, ...]
) -> None:
    override = f"model.override_config.rope_theta={THETA}"
    for name, keys in (
        ("overridden", [override]),
        ("by_hand", [f"model.path={edited}"]),
        ("plain", []),
    ):
        inside("train", str(config), *RUN, *actor, *keys, f"experiment={name}")
    runs = {name: tmp_path / "runs/tests" / name for name in ("overridden", "by_hand", "plain")}
    assert figures(runs["overridden"]) == figures(runs["by_hand"]) != figures(runs["plain"])
    exported = [
        json.loads((runs[name] / "final/config.json").read_text())
        for name in ("overridden", "by_hand")
    ]
    assert exported[0] == exported[1]
    assert exported[0]["rope_parameters"]["rope_theta"] == THETA
    # Of a checkpoint, too, which no engine has loaded; an adapter is merged there.
    inside("export", str(runs["overridden"]), str(tmp_path / "exported"))
    again = json.loads((tmp_path / "exported/config.json").read_text())
    assert again["rope_parameters"]["rope_theta"] == THETA


def test_check_names_an_unknown_key_once_and_takes_longer_samples_with_the_override(
    inside: Any, config: Path
) -> None:
    wrong = "model.override_config.max_positions=8192"
    found = inside("check", str(config), "algorithm.kl.in_loss.coef=0.1", wrong, check=False)
    assert found.exit_code == 2
    assert found.output.count("no key 'max_positions'") == 1
    assert "model.override_config.max_positions" in found.output
    assert "max_position_embeddings" in found.output

    long = "data.max_response_length=8000"
    found = inside("check", str(config), long, check=False)
    key = "model.override_config.max_position_embeddings=8064"
    assert key in found.output
    assert "ready to train" in inside("check", str(config), long, key).output
