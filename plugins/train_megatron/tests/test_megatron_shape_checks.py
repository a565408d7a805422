"""Checkpoints whose tensors differ from the network's are refused on all ranks, without changing the engine."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.errors import CheckpointError, ModelError

NORM = "model.layers.1.input_layernorm.weight"
BIAS = "model.layers.1.self_attn.o_proj.bias"


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        # A copy would broadcast this tensor over all features.
        (NORM, (1,), r"layers\.1\.input_layernorm\.weight' .* shape \(1,\); .* requires \(32,\)"),
        ("model.layers.0.mlp.up_proj.weight", (48, 32), r"\(48, 32\); .* requires \(64, 32\)"),
        # The network lacks this tensor, and would ignore it.
        (BIAS, (32,), r"not support .*, such as 'model\.layers\.1\.self_attn\.o_proj\.bias'"),
    ],
    ids=["spread", "cut", "left out"],
)
def test_weights_that_are_not_the_configs_are_refused_by_name(
    two, on_ranks, tiny, tmp_path, name, shape, said
):
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(shape)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        on_ranks(two, tmp_path / "model", tensor_parallel_size=2)


def test_a_state_that_does_not_fit_is_refused_before_it_changes_anything(
    two, on_ranks, tiny, batch, objective, tmp_path
):
    engine = on_ranks(two, tiny, tensor_parallel_size=2)
    engine.update(batch, objective).result()
    engine.save(tmp_path / "state").result()
    shutil.copytree(tmp_path / "state", tmp_path / "of_sgd")
    facts = json.loads((tmp_path / "of_sgd" / "training.json").read_text())
    facts["optimizer"]["parameters"] = {}
    (tmp_path / "of_sgd" / "training.json").write_text(json.dumps(facts))
    shutil.copytree(tmp_path / "state", tmp_path / "short")
    file = next((tmp_path / "short" / "moments").glob("*.safetensors"))
    moments = load_file(file)
    lost = min(moments)
    save_file({name: t for name, t in moments.items() if name != lost}, file)
    with pytest.raises(CheckpointError, match="no optimizer's moments"):
        engine.load(tmp_path / "of_sgd").result()
    with pytest.raises(CheckpointError, match=f"the tensor '{lost}' is missing"):
        engine.load(tmp_path / "short").result()
    without = on_ranks(two, tiny, tensor_parallel_size=2, optim={"name": "sgd"})
    with pytest.raises(CheckpointError, match=r"moments.*=sgd"):
        without.load(tmp_path / "state").result()
    # The engine still has its own moments.
    engine.save(tmp_path / "after").result()
    for kept in (tmp_path / "state" / "moments").glob("*.safetensors"):
        before, after = load_file(kept), load_file(tmp_path / "after" / "moments" / kept.name)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
