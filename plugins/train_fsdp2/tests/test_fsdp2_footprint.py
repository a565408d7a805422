"""The estimated memory of an update, compared with the tensors that autograd keeps in a real pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from dovetail.interfaces import PluginContext, UpdateSize, WorkingMemory
from dovetail.sections import ModelSection
from dovetail_torch_engines import LoraSection
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.engine import Fsdp2Engine
from dovetail_train_fsdp2.footprint import micro_batch_tokens, working_memory

LAYERS, TOKENS, HIDDEN = 3, 192, 64
SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.fixture(params=[Qwen2Config, LlamaConfig], ids=["qwen2", "llama"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(**SIZES).save_pretrained(tmp_path)
    return tmp_path


def parts(path: Path, **settings: Any) -> dict[str, int]:
    return dict(found(path, **settings).parts)


def sized(**changes: int) -> UpdateSize:
    """As many responses of one token as there are tokens, in one micro-batch."""
    size = UpdateSize(prompts=1, responses=TOKENS, prompt_tokens=0, response_tokens=1, budget=10**6)
    return attrs.evolve(size, **changes)


def found(
    path: Path, *, tokens: int = TOKENS, ranks: int = 1, trained: bool = True, **settings: Any
) -> WorkingMemory:
    context = PluginContext(model=ModelSection(path=str(path), dtype="float32"), trained=trained)
    config = Fsdp2Config(name="fsdp2", **settings)
    return working_memory(config, context, ranks=ranks, size=sized(responses=tokens))


def kept_for_real(path: Path) -> int:
    """Bytes that autograd keeps of a pass on the CPU over so many tokens, weights apart."""
    config = AutoConfig.from_pretrained(path)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    weights = {p.untyped_storage().data_ptr() for p in made.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    layers = made.base_model.layers
    sizes: list[int] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: kept.clear())
        layer.register_forward_hook(lambda *_: sizes.append(sum(kept.values())))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        made.base_model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
    return sum(sizes)


def test_activations_are_those_that_autograd_keeps(path: Path) -> None:
    real = kept_for_real(path)
    said = parts(path, gradient_checkpointing=False)["activations"]
    assert said == pytest.approx(real, rel=0.03)


def test_they_grow_with_tokens_and_shrink_with_what_is_computed_again(path: Path) -> None:
    every, cheap, none = (
        parts(path, gradient_checkpointing=how)["activations"] for how in (False, "selective", True)
    )
    twice = parts(path, gradient_checkpointing=False, tokens=2 * TOKENS)["activations"]
    assert twice == pytest.approx(2 * every, rel=1e-6)
    assert none == LAYERS * TOKENS * HIDDEN * 4
    assert none < cheap < every
    away = parts(path, gradient_checkpointing=True, offload_activations=True)
    assert away["activations"] == 0
    compiled = parts(path, gradient_checkpointing=False, compile=True)["activations"]
    assert none < compiled < every


def test_layers_that_compute_again_have_one_backward_pass_at_a_time(path: Path) -> None:
    """Else the output layer's buffers are most: a chunk of logits, and its weight's gradient in two dtypes."""
    every, again = (parts(path, gradient_checkpointing=how, tokens=4096) for how in (False, True))
    assert every["buffers"] == 4096 * 120 * 4 + 8 * 120 * HIDDEN
    assert again["buffers"] == pytest.approx(1.5 * every["activations"] / LAYERS, rel=0.01)


def test_auto_can_do_without_all_but_inputs(path: Path) -> None:
    auto, every, again = (found(path, gradient_checkpointing=how) for how in ("auto", False, True))
    assert auto.parts == every.parts
    assert every.spare == 0
    assert sum(auto.parts.values()) - auto.spare == sum(again.parts.values())


def test_logits_are_kept_where_there_is_room(path: Path) -> None:
    kept = found(path, gradient_checkpointing=False, keep_logits=True)
    assert kept.parts["logits"] == kept.spare == TOKENS * 120 * 4


def test_frozen_weights_need_no_inputs_and_a_frozen_model_keeps_nothing(path: Path) -> None:
    every = parts(path, gradient_checkpointing=False)
    lora = parts(path, gradient_checkpointing=False, lora=LoraSection(rank=4))
    assert lora["activations"] < every["activations"]
    assert lora["buffers"] == every["buffers"] - 8 * 120 * HIDDEN
    assert parts(path, trained=False)["activations"] == 0


@pytest.mark.parametrize(
    ("settings", "changes", "tokens"),
    [
        ({}, {}, 4 * (10 + 8 * 20)),  # each prompt once for 8 responses
        ({}, {"budget": 400}, 2 * (10 + 8 * 20)),
        ({}, {"budget": 120}, 10 + 5 * 20),  # a group in parts
        ({"share_prompts": "never"}, {}, 4 * 8 * 30),
        ({"share_prompts": "never"}, {"budget": 700}, 16 * 30),  # 32 samples in two halves
        ({"packing": "never"}, {"budget": 700}, 16 * 30),
        ({}, {"prompt_tokens": 1, "budget": 10**6}, 4 * 8 * 21),  # sharing gains too little
        ({}, {"budget": 7, "responses": 1}, 30),  # a sample that exceeds the budget
        # Units of several samples stay together, and their prompts are not shared.
        ({}, {"budget": 120, "responses": 2, "unit": "pair"}, 2 * 2 * 30),
        ({}, {"budget": 100, "responses": 2, "unit": "pair"}, 2 * 30),
        ({}, {"unit": "group"}, 4 * 8 * 30),
        ({}, {"budget": 300, "unit": "group"}, 8 * 30),
    ],
)
def test_a_micro_batch_holds_whole_samples_and_about_as_many_as_the_others(
    settings: dict[str, Any], changes: dict[str, Any], tokens: int
) -> None:
    size = UpdateSize(prompts=4, responses=8, prompt_tokens=10, response_tokens=20, budget=1000)
    config = Fsdp2Config(name="fsdp2", **settings)
    assert micro_batch_tokens(config, attrs.evolve(size, **changes)) == tokens


def test_shards_gather_two_layers_and_the_gradients_of_all_ranks(path: Path) -> None:
    alone, four = parts(path), parts(path, ranks=4)
    outside = (2 * 120 * HIDDEN + HIDDEN) * 4
    a_layer = (alone["weights, gathered"] - outside) / LAYERS
    assert four["weights, gathered"] == outside + 2 * a_layer
    assert four["gradients of other ranks"] == pytest.approx(
        0.75 * alone["weights, gathered"], abs=8
    )
    scattered = parts(path, ranks=4, reduce_gradients="every_micro_batch")
    assert "gradients of other ranks" not in scattered


def test_a_model_that_can_not_be_built_is_not_judged(tmp_path: Path) -> None:
    section = ModelSection(path=str(tmp_path / "nowhere"))
    config = Fsdp2Config(name="fsdp2")
    given: Any = {"head": "lm", "trained": True, "ranks": 1, "size": sized()}
    assert Fsdp2Engine.working_memory(config, section, **given) is None
