"""Adapters in every engine: names of tensors, description, and initial values of the matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dovetail_torch_engines import LoraSection, described, drawn_a, state_name, wire_name

LAYER = "model.layers.0.default.q_proj"
WIRE = f"base_model.model.{LAYER}"


@pytest.mark.parametrize(
    ("state", "wire"),
    [
        (state_name(LAYER, "lora_A"), f"{WIRE}.lora_A.weight"),
        (state_name(LAYER, "lora_B"), f"{WIRE}.lora_B.weight"),
        # In peft, neither of these is a module, so that its name does not end in `weight`.
        (state_name(LAYER, "lora_magnitude_vector"), f"{WIRE}.lora_magnitude_vector"),
        (f"{LAYER}.lora_embedding_A.default", f"{WIRE}.lora_embedding_A"),
    ],
)
def test_on_the_wire_tensors_have_the_names_of_pefts_checkpoints(state: str, wire: str) -> None:
    assert wire_name(state) == wire


def test_states_name_tensors_as_pefts_models_do() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = nn.ModuleDict({"q_proj": nn.Linear(3, 4)})
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    adapted = peft.get_peft_model(model, config)
    kinds = ("lora_A", "lora_B", "lora_magnitude_vector")
    held = {name.removeprefix("base_model.model.") for name in adapted.state_dict()}
    assert {state_name("q_proj", kind) for kind in kinds} <= held
    assert {wire_name(state_name("q_proj", kind)) for kind in kinds} == set(
        peft.get_peft_model_state_dict(adapted)
    )


def test_it_is_described_by_its_section_and_the_last_parts_of_its_layers_names() -> None:
    section = LoraSection(rank=4, alpha=6.0, rank_stabilised=True, dora=True)
    spec = described(section, [f"{LAYER[:-6]}{name}" for name in ("v_proj", "q_proj", "v_proj")])
    assert spec.target_modules == ("q_proj", "v_proj")
    assert (spec.rank, spec.alpha, spec.rank_stabilised, spec.dora) == (4, 6.0, True, True)


def test_a_starts_as_torchs_linear_layers_do_and_leaves_torchs_own_random_state() -> None:
    torch.manual_seed(5)
    layer = nn.Linear(7, 3, bias=False)
    before = torch.get_rng_state()
    start_RI = drawn_a(3, 7, torch.Generator().manual_seed(5))
    assert torch.equal(start_RI, layer.weight)
    assert start_RI.abs().max() <= 1 / math.sqrt(7)
    assert torch.equal(torch.get_rng_state(), before)
