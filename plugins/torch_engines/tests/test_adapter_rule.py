"""The rule `adapter_targets`: targets that the model lacks, or that can't have an adapter."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AfmoeConfig, MixtralConfig, Qwen2Config

GAE = "algorithm.advantage=gae"
NAMES = "down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A section with a model of which there is nothing but its config."""
    path = tmp_path_factory.mktemp("model")
    Qwen2Config(**SIZES).save_pretrained(path)
    return {"model": {"path": str(path)}}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same with one weight for embedding and output layer."""
    path = tmp_path_factory.mktemp("tied")
    Qwen2Config(**SIZES, tie_word_embeddings=True).save_pretrained(path)
    return {"model": {"path": str(path)}}


def engine(*targets: str, name: str = "fsdp2") -> str:
    return f"actor.engine={{name: {name}, lora: {{target_modules: [{', '.join(targets)}]}}}}"


@pytest.mark.parametrize("name", ["fsdp2", "megatron"])
def test_a_layer_that_is_not_there_is_named_with_the_nearest(judge, model, name) -> None:
    (finding,) = judge("adapter_targets", model, engine("q_proj", "v_porj", name=name))
    assert finding.severity == "error"
    assert finding.message.startswith("actor.engine: ")
    assert "'v_porj'" in finding.message
    assert finding.hint == f"did you mean 'v_proj'? The model's layers are {NAMES}"


def test_what_is_near_nothing_is_told_what_there_is(judge, model) -> None:
    (finding,) = judge("adapter_targets", model, engine("Wqkv_xyz_0123"))
    assert finding.hint == f"The model's layers are {NAMES}"


def test_a_critic_with_the_actors_engine_says_the_same_once(judge, model, tied) -> None:
    assert len(judge("adapter_targets", model, engine("wrong"), GAE)) == 1
    other = f"critic.path={tied['model']['path']}"
    assert len(judge("adapter_targets", model, engine("mlp"), GAE, other)) == 1
    own = "critic.engine={name: fsdp2, lora: {target_modules: [wrong]}}"
    (finding,) = judge("adapter_targets", model, own, GAE)
    assert finding.message.startswith("critic.engine: ")


@pytest.mark.parametrize(
    ("target", "module", "hint"),
    [
        ("mlp", "model.layers.0.mlp", "layers inside this module: down_proj, gate_proj, up_proj"),
        ("layers.0.self_attn", "model.layers.0.self_attn", "k_proj, o_proj, q_proj, v_proj"),
        ("norm", "model.norm", "name linear layers"),
    ],
)
def test_what_is_no_layer_is_refused_with_the_layers_inside(
    judge, model, target, module, hint
) -> None:
    (finding,) = judge("adapter_targets", model, engine("q_proj", target))
    assert finding.severity == "error"
    assert finding.message == (
        f"actor.engine: lora.target_modules names {target!r}, but the model's module {module!r} has no weight matrix"
    )
    assert hint in finding.hint


@pytest.mark.parametrize(
    ("target", "layer"), [("lm_head", "lm_head"), ("embed_tokens", "model.embed_tokens")]
)
def test_a_tied_weight_is_refused_where_both_its_layers_are(
    judge, model, tied, target, layer
) -> None:
    (finding,) = judge("adapter_targets", tied, engine(target, "q_proj"), GAE)
    assert finding.message.startswith(f"actor.engine: lora.target_modules names {layer!r}, which")
    assert finding.hint == (
        "leave this layer out: merging its update would give the two layers different weights"
    )
    assert judge("adapter_targets", model, engine(target)) == []
    # A critic's value head replaces the output layer, with which the embedding is tied.
    own = f"critic.engine={{name: fsdp2, lora: {{target_modules: [q_proj, {target}]}}}}"
    assert judge("adapter_targets", tied, own, GAE) == []


@pytest.mark.parametrize("linear", [False, True])
def test_a_router_of_experts_has_a_matrix_of_its_own(judge, tmp_path, linear) -> None:
    """Whether it is a linear layer or a module of the model's own."""
    moe = {"moe_intermediate_size": 8, "num_dense_layers": 0, "num_experts": 2}
    config = AfmoeConfig(**SIZES, **moe) if linear else MixtralConfig(**SIZES, num_local_experts=2)
    config.save_pretrained(tmp_path)
    section = {"model": {"path": str(tmp_path)}}
    assert judge("adapter_targets", section, engine("gate")) == []
    (finding,) = judge("adapter_targets", section, engine("experts"))
    assert "'model.layers.0.mlp.experts' has no weight matrix" in finding.message


@pytest.mark.parametrize(
    "overrides",
    [
        [engine("q_proj", "model.layers.0.mlp.up_proj")],
        [engine("all-linear")],
        [engine("embed_tokens", "all-linear")],
        ["actor.engine=fsdp2"],
    ],
)
def test_layers_that_are_there_are_not_spoken_of(judge, model, overrides) -> None:
    assert judge("adapter_targets", model, *overrides) == []


def test_a_model_that_is_not_here_is_left_to_the_engine(judge) -> None:
    assert judge("adapter_targets", {"model": {"path": "nowhere"}}, engine("wrong")) == []
