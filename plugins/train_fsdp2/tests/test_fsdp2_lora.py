"""LoRA: the trained parameters, the sent weights, and the base as the reference policy."""

import sys

import numpy as np
import pytest
import torch
from trained_engines import Kept, parameters_of

from dovetail.config import config_from_mapping
from dovetail.errors import CheckpointError, ConfigError, PlanError, PluginNeedsError
from dovetail.planning.plan import make_plan
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.engine import Fsdp2Engine

pytest.importorskip("peft")
BOTH = frozenset({"log_probs", "ref_log_probs"})
LORA = Fsdp2Config(lora=LoraSection(rank=4))


@pytest.fixture(scope="session")
def stored_narrow(tmp_path_factory):
    """A checkpoint whose weights bfloat16 holds exactly, with an output layer of its own."""
    directory = tmp_path_factory.mktemp("narrow")
    return tiny_model_and_tokenizer(
        directory, vocab_size=300, hidden_size=32, dtype="bfloat16", tie_word_embeddings=False
    )


def log_probs(engine, batch):
    return engine.forward(batch, frozenset({"log_probs"}))["log_probs"].values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpoint", ["tiny", "stored_narrow"])
def test_the_base_is_the_reference_bit_for_bit_before_and_after_training(
    request, make_engine, batch, objective, checkpoint, dtype
):
    path = request.getfixturevalue(checkpoint)
    expected = log_probs(make_engine(path, dtype=dtype), batch)
    engine = make_engine(path, dtype=dtype, config=LORA, lr=1e-2)
    before = engine.forward(batch, BOTH)
    np.testing.assert_array_equal(before["ref_log_probs"].values, expected)
    np.testing.assert_array_equal(before["log_probs"].values, expected)
    for _ in range(2):
        engine.update(batch, objective)
    after = engine.forward(batch, BOTH)
    np.testing.assert_array_equal(after["ref_log_probs"].values, expected)
    assert np.abs(after["log_probs"].values - expected).max() > 1e-2


def test_only_the_adapter_is_trained_in_float32(stored_narrow, make_engine, batch, objective):
    engine = make_engine(stored_narrow, dtype="bfloat16", config=LORA, lr=1e-2)
    adapter, frozen = parameters_of(engine, trained=True), parameters_of(engine, trained=False)
    engine.update(batch, objective)
    assert {p.dtype for p in adapter.values()} == {torch.float32}
    assert all("lora_" in name for name in adapter)
    torch.testing.assert_close(parameters_of(engine, trained=False), frozen, rtol=0, atol=0)
    assert any(
        not torch.equal(p, adapter[n]) for n, p in parameters_of(engine, trained=True).items()
    )
    # Frozen linear layers keep the stored dtype, bfloat16; the embedding, whose output is the residual stream, is float32.
    dtypes = {n: p.dtype for n, p in frozen.items()}
    assert dtypes["model.layers.0.mlp.up_proj.base_layer.weight"] == torch.bfloat16
    assert dtypes["model.embed_tokens.weight"] == torch.float32


def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(
    tiny, make_engine, gradients, batch, objective
):
    """With W = W0 + s B A: dL/dB = s (dL/dW) Aᵀ and dL/dA = s Bᵀ (dL/dW)."""
    rate = {"lr": 1e-2}
    engine = make_engine(tiny, config=LORA, **rate)
    engine.update(batch, objective)
    found, _ = gradients(engine, batch, objective)
    transport = Kept()
    object.__setattr__(engine.context, "transport", transport)
    engine.send_weights(1, engine.weight_manifest(1))
    full = make_engine(tiny)
    with torch.no_grad():
        for name, parameter in full._runner.model.named_parameters():
            parameter.copy_(transport.sent[name])
    whole, _ = gradients(full, batch, objective)
    matrices = parameters_of(engine, trained=True)
    layer = "model.layers.1.mlp.down_proj"
    a, b = (matrices[f"{layer}.lora_{x}.default.weight"] for x in "AB")
    scale, of_w = 32.0 / 4, whole[f"{layer}.weight"]
    assert of_w.abs().max() > 1e-4
    torch.testing.assert_close(
        found[f"{layer}.lora_B.default.weight"], scale * of_w @ a.T, rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(
        found[f"{layer}.lora_A.default.weight"], scale * b.T @ of_w, rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_and_layouts_make_no_difference(
    tiny, make_engine, gradients, batch, objective, recompute
):
    config = Fsdp2Config(lora=LORA.lora, gradient_checkpointing=recompute, share_prompts="always")
    whole, _ = gradients(make_engine(tiny, config=LORA), batch, objective)
    cut, _ = gradients(make_engine(tiny, config=config, budget=33), batch, objective)
    torch.testing.assert_close(whole, cut, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_merged_weights_travel_under_the_names_of_the_base(
    tiny, make_engine, batch, objective, tmp_path, architecture
):
    from transformers import AutoModelForCausalLM, GPT2Config

    path = tiny
    if architecture == "gpt2":  # stores weights transposed
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        path = tmp_path
    transport = Kept()
    engine = make_engine(path, config=LORA, transport=transport, lr=1e-2)
    for _ in range(2):
        engine.update(batch, objective)
    before = parameters_of(engine)
    manifest = engine.weight_manifest(1)
    engine.send_weights(1, manifest)
    plain = make_engine(path)
    assert manifest == plain.weight_manifest(1)
    model = plain._runner.model
    moved = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            moved += not torch.equal(parameter, transport.sent[name])
            parameter.copy_(transport.sent[name])
    assert moved
    np.testing.assert_allclose(log_probs(plain, batch), log_probs(engine, batch), atol=2e-6)
    torch.testing.assert_close(parameters_of(engine), before, rtol=0, atol=0)


def test_merging_is_in_float32_before_the_cast(stored_narrow, make_engine, batch, objective):
    transport = Kept()
    engine = make_engine(stored_narrow, dtype="bfloat16", config=LORA, transport=transport, lr=1e-2)
    engine.update(batch, objective)
    engine.send_weights(1, engine.weight_manifest(1))
    named = dict(engine._runner.model.named_parameters())
    layer = "model.layers.0.self_attn.q_proj"
    a, b = (named[f"{layer}.lora_{x}.default.weight"] for x in "AB")
    exact = named[f"{layer}.base_layer.weight"].float() + (32.0 / 4) * (b @ a)
    assert torch.equal(transport.sent[f"{layer}.weight"], exact.bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_the_merged_model(tiny, make_engine, batch, objective, tmp_path, dtype):
    engine = make_engine(tiny, dtype=dtype, config=LORA, lr=1e-2)
    for _ in range(2):
        engine.update(batch, objective)
    engine.export(tmp_path)
    tolerance = 2e-6 if dtype == "float32" else 0.02
    merged = log_probs(make_engine(tmp_path, dtype=dtype), batch)
    np.testing.assert_allclose(merged, log_probs(engine, batch), atol=tolerance)


def test_a_checkpoint_holds_the_adapter_and_resumes_exactly(
    tiny, make_engine, batch, objective, tmp_path
):
    from safetensors.torch import load_file

    settings = {"config": LORA, "lr": 1e-2, "schedule": "linear", "total_steps": 5}
    engine = make_engine(tiny, **settings)
    engine.update(batch, objective)
    engine.save(tmp_path)
    metrics = engine.update(batch, objective)
    (weights,) = (tmp_path / "weights").glob("*.safetensors")
    assert all("lora_" in name for name in load_file(weights))
    resumed = make_engine(tiny, **settings)
    resumed.load(tmp_path)
    assert resumed.update(batch, objective) == metrics
    one, other = (parameters_of(each, trained=True) for each in (engine, resumed))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="another model"):
        make_engine(tiny).load(tmp_path)


def test_the_adapter_starts_from_the_seed_and_leaves_torchs_own_alone(tiny, make_engine):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, same, other = (make_engine(tiny, config=LORA, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    one, same, other = (parameters_of(engine, trained=True) for engine in (one, same, other))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_scale_is_alpha_over_rank_or_its_root(tiny, make_engine):
    for stabilised, expected in ((False, 8 / 4), (True, 8 / 2)):
        section = LoraSection(rank=4, alpha=8.0, rank_stabilised=stabilised)
        engine = make_engine(tiny, config=Fsdp2Config(lora=section))
        for layer in engine._runner.adapter._layers.values():
            assert layer.scaling["default"] == expected


def test_only_the_layers_that_are_named_are_adapted(tiny, make_engine):
    section = LoraSection(rank=2, target_modules=("q_proj", "v_proj"))
    engine = make_engine(tiny, config=Fsdp2Config(lora=section))
    named = {name.rpartition(".")[2] for name in engine._runner.adapter._layers}
    assert named == {"q_proj", "v_proj"}
    every = {n.rpartition(".")[2] for n in make_engine(tiny, config=LORA)._runner.adapter._layers}
    assert every == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_layers_that_a_pattern_excludes_are_left_as_they_are(tiny, make_engine):
    section = LoraSection(rank=2, exclude_modules=r".*\.mlp\..*")
    engine = make_engine(tiny, config=Fsdp2Config(lora=section))
    found = {name.rpartition(".")[2] for name in engine._runner.adapter._layers}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match="excludes every layer"):
        make_engine(tiny, config=Fsdp2Config(lora=LoraSection(exclude_modules=".*")))
    with pytest.raises(ValueError, match="regular expression"):
        LoraSection(exclude_modules="*visual*")


def test_layers_that_can_not_be_adapted(tiny, make_engine, tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    def start(path, *targets):
        make_engine(path, config=Fsdp2Config(lora=LoraSection(rank=2, target_modules=targets)))

    with pytest.raises(
        ConfigError, match=r"nowhere(.|\n)*to all-linear, or to some of: (.*)q_proj"
    ):
        start(tiny, "nowhere")
    with pytest.raises(ConfigError, match="its weight with another layer"):
        start(tiny, "lm_head")
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="weights of all experts"):
        start(tmp_path, "all-linear")
    start(tmp_path, "q_proj", "o_proj")


def test_an_untied_output_layer_can_be_adapted(stored_narrow, make_engine, batch, objective):
    section = LoraSection(rank=2, target_modules=("lm_head",))
    engine = make_engine(stored_narrow, config=Fsdp2Config(lora=section), lr=1e-2)
    expected = log_probs(make_engine(stored_narrow), batch)
    engine.update(batch, objective)
    after = engine.forward(batch, BOTH)
    np.testing.assert_allclose(after["ref_log_probs"].values, expected, atol=2e-6)
    assert np.abs(after["log_probs"].values - expected).max() > 1e-3


def test_a_reference_of_its_own_gets_no_adapter(tiny, make_engine):
    assert make_engine(tiny, config=LORA, trained=False)._runner.adapter is None


def test_ref_log_probs_are_provided_with_an_adapter_only(tiny, make_engine, batch):
    assert Fsdp2Engine.provides(LORA) == {"ref_log_probs"}
    assert Fsdp2Engine.provides(Fsdp2Config()) == frozenset()
    with pytest.raises(ConfigError, match="lora"):
        make_engine(tiny).forward(batch, BOTH)


def test_without_peft_it_says_what_to_install(tiny, make_engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PluginNeedsError, match=r"pip install 'dovetail-train-fsdp2\[lora\]'"):
        make_engine(tiny, config=LORA)


def test_an_adapter_alone_is_refused_before_anything_starts_where_the_rollout_can_not_apply_it():
    lora = {"rank": 4, "sync": "adapter"}
    raw = {"model": {"path": "tiny"}, "rollout": "hf"}
    engine = {"name": "fsdp2", "lora": lora}
    with pytest.raises(PlanError, match=r"adapter alone.*'hf'"):
        make_plan(config_from_mapping({**raw, "actor": {"engine": engine}}, []).config)
    lora["sync"] = "merged"
    assert make_plan(config_from_mapping({**raw, "actor": {"engine": engine}}, []).config)
