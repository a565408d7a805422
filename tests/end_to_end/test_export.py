"""A run that completes leaves its model in `final/`, as any other Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.errors import ConfigError
from dovetail.run.run import train

BEST = ("trainer.best_metric=val/mean@1", "trainer.validate_every=1", "trainer.export=best")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The actor's weights in a checkpoint."""
    [file] = (run / "checkpoints" / f"step_{step}" / "actor" / "weights").glob("*.safetensors")
    return load_file(file)


def exported(run: Path) -> dict[str, torch.Tensor]:
    """The weights in `final/`, as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    return model.state_dict()


def same(exported: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(exported[name], tensor) for name, tensor in kept.items())


def test_a_completed_run_leaves_its_model(config: Path, tiny: Path, tmp_path: Path) -> None:
    summary = train(config)
    run = tmp_path / "runs" / "tests" / "run"
    assert summary["model"] == str(run / "final")
    assert same(exported(run), weights(run, 3))
    before, after = (AutoTokenizer.from_pretrained(path) for path in (tiny, run / "final"))
    assert after.get_vocab() == before.get_vocab()
    assert after.chat_template == before.chat_template
    assert json.loads((run / "final" / "generation_config.json").read_text())


@pytest.mark.parametrize("extreme", ["max", "min"])
def test_the_best_checkpoint_is_exported(config: Path, tmp_path: Path, extreme: str) -> None:
    """Of the two extremes one at least is not the last step's."""
    summary = train(config, [*BEST, f"trainer.best_is={extreme}"])
    run = tmp_path / "runs" / "tests" / "run"
    step = summary["best"]["step"]
    assert same(exported(run), weights(run, step))
    assert step == 3 or not same(exported(run), weights(run, 3))


def test_no_model_is_left_where_none_is_asked_for(config: Path, tmp_path: Path) -> None:
    summary = train(config, ["trainer.export=none", "trainer.total_steps=1"])
    assert summary["model"] is None
    assert not (tmp_path / "runs" / "tests" / "run" / "final").exists()


def test_the_best_needs_a_metric(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"export = best needs .* trainer\.best_metric"):
        train(config, ["trainer.export=best"])
