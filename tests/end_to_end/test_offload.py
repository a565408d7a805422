"""Roles that keep off the accelerator between their phases: nothing computes while away, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from dovetail.run.run import train
from dovetail_rollout_hf.rollout import HfRollout

PPO = (
    "algorithm.preset=ppo",
    "trainer.total_steps=2",
    "trainer.validate_after=false",
    "trainer.validate_before=false",
)
EVERY_ROLE = tuple(f"{role}.offload=true" for role in ("actor", "critic", "ref"))


def trained(config: Path, directory: Path, *overrides: str) -> dict[tuple[str, str], Any]:
    """Weights of every trained role after the run, by role and name."""
    train(config, [*PPO, f"output_dir={directory}", *overrides])
    return {
        (role, name): weight
        for role in ("actor", "critic")
        for file in directory.rglob(f"step_2/{role}/weights/*.safetensors")
        for name, weight in load_file(file).items()
    }


def test_ppo_trains_the_same_with_every_role_offloaded(
    config: Path, tmp_path: Path, moves: list[tuple[str, str]]
) -> None:
    stayed = trained(config, tmp_path / "stayed")
    assert moves == []
    went = trained(config, tmp_path / "went", *EVERY_ROLE)
    assert {role for role, _ in stayed} == {"actor", "critic"}
    assert stayed.keys() == went.keys()
    assert all((weight == went[name]).all() for name, weight in stayed.items())
    for role in ("actor", "critic", "ref"):
        own = [where for who, where in moves if who == role]
        assert own.count("back") >= 2, role
        assert own == ["away", "back"] * (len(own) // 2) + ["away"] * (len(own) % 2), role


@pytest.mark.parametrize("keeps", [True, False])
def test_training_is_the_same_with_an_engine_that_sleeps_in_between(
    config: Path,
    tmp_path: Path,
    moves: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    """With a validation after every step; an engine that may forget its weights really loses them."""
    sleep, wake = HfRollout.sleep, HfRollout.wake

    def sleeps(self: Any, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        assert keep_weights == keeps
        if not keep_weights:
            for weight in self._model.parameters():
                weight.data.fill_(float("nan"))
        return sleep(self, tags)

    def wakes(self: Any, tags: frozenset[str]) -> None:
        # Before keys and values have room again, every training role has left.
        assert "kv_cache" not in tags or moves[-1][1] == "away"
        wake(self, tags)

    validated = ("trainer.validate_every=1", "rollout.weight_check.every=1")
    stayed = trained(config, tmp_path / "stayed", *validated)
    monkeypatch.setattr(HfRollout, "sleep", sleeps)
    monkeypatch.setattr(HfRollout, "wake", wakes)
    if not keeps:
        more = HfRollout.capabilities | {"discards_weights"}
        monkeypatch.setattr(HfRollout, "capabilities", more)
    slept = trained(config, tmp_path / "slept", *validated, *EVERY_ROLE, "rollout.offload=true")
    assert stayed.keys() == slept.keys()
    assert all((weight == slept[name]).all() for name, weight in stayed.items())
    metrics = (tmp_path / "slept/tests/run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in metrics if "rollout/freed_bytes" in line]
    assert len(steps) == 2
    assert all(step["time/sleep"] > 0 and step["time/wake"] > 0 for step in steps)
    assert all(step["weight_check/max_difference"] < 1e-4 for step in steps)
