"""Fused layers of vLLM: an update has all parts of a layer or none; parts that the architecture itself lacks are not missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dovetail.errors import WeightSyncError
from dovetail_rollout_vllm.fused import FusedLayers, refuse_shrunk

PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "experts.w13_": [f"experts.{e}.{m}_proj." for e in range(2) for m in ("gate", "up")],
    "experts.w2_": [f"experts.{e}.down_proj." for e in range(2)],
}
NAMES = frozenset(
    f"model.layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in (
        *(f"self_attn.{m}_proj" for m in "qkvo"),
        "mlp.shared.gate_proj",
        "mlp.shared.up_proj",
        "mlp.gate",
        *(f"mlp.experts.{e}.{m}_proj" for e in range(2) for m in ("gate", "up", "down")),
    )
)


def test_a_whole_update_passes() -> None:
    FusedLayers(PARTS).refuse_incomplete(1, NAMES)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.shared.up_proj.weight",
        "model.layers.0.mlp.experts.1.gate_proj.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight",
    ],
)
def test_one_part_that_does_not_come_is_named(name: str) -> None:
    with pytest.raises(WeightSyncError, match=f"update 4 .*not '{name}'"):
        FusedLayers(PARTS).refuse_incomplete(4, NAMES - {name})


def test_several_are_counted() -> None:
    gone = {n for n in NAMES if "k_proj" in n or "experts.0.gate_proj" in n}
    with pytest.raises(WeightSyncError, match="missing parts of such layers: 4"):
        FusedLayers(PARTS).refuse_incomplete(1, NAMES - gone)


def test_each_layer_is_looked_at_once_however_many_parts_it_has() -> None:
    asked = []

    class Noted(dict[str, list[str]]):
        def __getitem__(self, whole: str) -> list[str]:
            asked.append(whole)
            return super().__getitem__(whole)

    FusedLayers(Noted(PARTS)).refuse_incomplete(1, NAMES)
    assert sorted(asked) == sorted([*PARTS] * 2)


def test_what_does_not_come_at_all_is_for_the_model_to_miss() -> None:
    rest = {n for n in NAMES if "layers.1.self_attn" not in n}
    FusedLayers(PARTS).refuse_incomplete(1, rest)


def test_a_part_that_the_checkpoint_lacks_too_is_not_missing(tmp_path: Path) -> None:
    """Keys that serve as values, or a projection without the bias that its siblings have."""
    without_values = NAMES - {"model.layers.0.self_attn.v_proj.weight"}
    save_file({name: torch.zeros(1) for name in without_values}, tmp_path / "model.safetensors")
    layers = FusedLayers(PARTS, tmp_path)
    layers.refuse_incomplete(1, without_values)
    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.v_proj"):
        layers.refuse_incomplete(1, without_values - {"model.layers.1.self_attn.v_proj.weight"})


def test_a_checkpoint_with_other_names_excuses_nothing(tmp_path: Path) -> None:
    save_file({"transformer.h.0.attn.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightSyncError, match="v_proj"):
        FusedLayers(PARTS, tmp_path).refuse_incomplete(
            1, NAMES - {"model.layers.0.self_attn.v_proj.weight"}
        )


def test_an_update_smaller_than_the_one_before_is_refused() -> None:
    refuse_shrunk(2, NAMES | {"more"}, NAMES)
    with pytest.raises(WeightSyncError, match=r"update 2 lacks model\.layers\.0\.mlp"):
        refuse_shrunk(2, NAMES - {n for n in NAMES if "mlp.gate." in n}, NAMES)
