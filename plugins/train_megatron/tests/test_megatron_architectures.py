"""Every architecture: Megatron's layers, divided among ranks, compute the same as transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail.metrics import values

SIZES = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """Write a tiny random model of a family; its directory."""

    def make(family):
        import transformers

        torch.manual_seed(1)
        name, further = CASES[family]
        config = getattr(transformers, name)(**SIZES, **further)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        return directory

    return make


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        pytest.param("llama", {"pipeline_parallel_size": 2}, marks=pytest.mark.nightly),
        ("qwen3", {"tensor_parallel_size": 2}),
        pytest.param("qwen3", {"context_parallel_size": 2}, marks=pytest.mark.nightly),
        ("qwen3_moe", {"expert_parallel_size": 2}),
        ("qwen3_moe", {"context_parallel_size": 2, "expert_parallel_size": 2}),
        pytest.param("qwen3_moe", {"tensor_parallel_size": 2}, marks=pytest.mark.nightly),
        ("mixtral", {"pipeline_parallel_size": 2}),
    ],
)
def test_scores_and_an_update_are_those_of_transformers(
    two, on_ranks, make_model, batch, objective, plain, tmp_path, family, layout
):
    directory = make_model(family)
    engine = on_ranks(two, directory, **layout)
    scores = engine.forward(batch, frozenset({"log_probs"})).result()["log_probs"]
    metrics = values(engine.update(batch, objective).result())
    engine.export(tmp_path / "out").result()
    loss, norm, expected, weights = plain(directory, batch)
    np.testing.assert_allclose(scores.values, expected["log_probs"], atol=3e-5)
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    if family in {"llama", "qwen3"}:
        # transformers fuses a mixture's experts in memory: for mixtures, outputs are compared instead of tensors.
        exported = load_file(tmp_path / "out" / "model.safetensors")
        assert exported.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(exported[name], tensor, atol=5e-5, rtol=1e-4)
    again = engine.forward(batch, frozenset({"log_probs"})).result()["log_probs"]
    _, _, after, _ = plain(tmp_path / "out", batch)
    np.testing.assert_allclose(again.values, after["log_probs"], atol=1e-4)
