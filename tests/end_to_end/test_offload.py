"""Roles that keep off the accelerator between their phases: nothing computes while away, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from dovetail.flow.run import train
from dovetail_train_fsdp2.engine import Fsdp2Engine

PPO = (
    "algorithm.preset=ppo",
    "trainer.total_steps=2",
    "trainer.validate_after=false",
    "trainer.validate_before=false",
)
EVERY_ROLE = tuple(f"{role}.offload=true" for role in ("actor", "critic", "ref"))


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Every move of a model, as (role, where to).

    An engine on the CPU has nowhere to go. Here it goes in name, so that it refuses to compute while it is away, as
    it does on an accelerator.
    """
    seen: list[tuple[str, str]] = []

    def move(self: Any, device: Any, *, offloaded: bool) -> None:
        seen.append((self.context.role, "away" if offloaded else "back"))
        self._offloaded = offloaded

    monkeypatch.setattr(Fsdp2Engine, "_move", move)
    return seen


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
