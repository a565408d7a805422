"""Layers that an adapter is to be put on, and that the model does not have."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

GAE = "algorithm.advantage=gae"
NAMES = "down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A section with a model of which there is nothing but its config."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2Config(vocab_size=40, intermediate_size=32, num_hidden_layers=1, **sizes).save_pretrained(
        path
    )
    return {"model": {"path": str(path)}}


def engine(*targets: str, name: str = "fsdp2") -> str:
    return f"actor.engine={{name: {name}, lora: {{target_modules: [{', '.join(targets)}]}}}}"


@pytest.mark.parametrize("name", ["fsdp2", "megatron"])
def test_a_layer_that_is_not_there_is_named_with_the_nearest(judge, model, name) -> None:
    (finding,) = judge("adapter_targets", model, engine("q_proj", "v_porj", name=name))
    assert finding.severity == "error"
    assert finding.message.startswith("actor.engine: ")
    assert "'v_porj'" in finding.message
    assert finding.hint == f"did you mean 'v_proj'? Its layers are {NAMES}"


def test_what_is_near_nothing_is_told_what_there_is(judge, model) -> None:
    (finding,) = judge("adapter_targets", model, engine("Wqkv_xyz_0123"))
    assert finding.hint == f"Its layers are {NAMES}"


def test_a_critic_with_the_actors_engine_says_the_same_once(judge, model) -> None:
    assert len(judge("adapter_targets", model, engine("wrong"), GAE)) == 1
    own = "critic.engine={name: fsdp2, lora: {target_modules: [wrong]}}"
    (finding,) = judge("adapter_targets", model, own, GAE)
    assert finding.message.startswith("critic.engine: ")


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
