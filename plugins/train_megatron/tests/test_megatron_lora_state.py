"""Adapters: training states in any layout and of the engine `fsdp2`, sent weights, critics, and layers that can't be adapted."""

from __future__ import annotations

import json
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from cuda_stand_in import MegatronOnCpu
from safetensors.torch import load_file
from trained_engines import exported
from training_states import critic_norm, kept

from dovetail.config import config_from_mapping
from dovetail.errors import CheckpointError, ConfigError, PlanError
from dovetail.interfaces import AdapterSpec, PluginContext, PluginRef
from dovetail.metrics import values
from dovetail.planning.plan import make_plan
from dovetail.sections import ModelSection
from dovetail_rollouts.transports.config import DiskTransportConfig
from dovetail_rollouts.transports.disk import DiskTransport
from dovetail_torch_engines import LoraSection
from dovetail_train_megatron.config import MegatronConfig

pytest.importorskip("peft")
SECTION = LoraSection(rank=4, alpha=8.0)
DORA = LoraSection(rank=4, alpha=8.0, dora=True)
ATTENTION = LoraSection(rank=4, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
EXPERTS = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "norm_topk_prob": True,
}
TP, PP, CP = ({f"{axis}_parallel_size": 2} for axis in ("tensor", "pipeline", "context"))


assert_close = partial(torch.testing.assert_close, atol=5e-5, rtol=1e-4)


def scores(engine, batch):
    return engine.forward(batch, frozenset({"log_probs"})).result()["log_probs"].values


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(TP, PP, marks=pytest.mark.nightly),
        pytest.param(PP, CP, marks=pytest.mark.nightly),
        pytest.param({}, TP, marks=pytest.mark.nightly),
    ],
)
def test_an_adapter_is_continued_in_another_layout(
    two, on_ranks, tiny, batch, objective, tmp_path, first, then
):
    engine = on_ranks(two, tiny, lora=SECTION, **first)
    start = kept(engine, tmp_path / "start")
    engine.update(batch, objective).result()
    engine.save(tmp_path / "state").result()
    engine.update(batch, objective).result()
    expected = kept(engine, tmp_path / "one")
    engine.close()
    other = on_ranks(two, tiny, lora=SECTION, **then)
    assert all(torch.equal(start[n], t) for n, t in kept(other, tmp_path / "other").items())
    other.load(tmp_path / "state").result()
    other.update(batch, objective).result()
    assert_close(kept(other, tmp_path / "two"), expected)


@pytest.mark.parametrize(
    ("layout", "section"),
    [
        pytest.param(TP, SECTION, id="tp2"),
        pytest.param(PP, SECTION, id="pp2", marks=pytest.mark.nightly),
        pytest.param(TP, DORA, id="tp2, magnitudes", marks=pytest.mark.nightly),
    ],
)
def test_both_engines_start_alike_and_continue_each_others_adapters(
    two, on_ranks, other_engine, tiny, batch, objective, tmp_path, layout, section
):
    megatron = on_ranks(two, tiny, lora=section, **layout)
    fsdp2 = other_engine(tiny, lora=section)
    ours, theirs = (kept(e, tmp_path / f"start{i}") for i, e in enumerate((megatron, fsdp2)))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    for name, tensor in theirs.items():
        # Initial matrices are equal; magnitudes are sums in another order.
        bound = 1e-6 if "magnitude" in name else 0
        torch.testing.assert_close(ours[name], tensor, rtol=bound, atol=0)
    found = []
    for engine in (megatron, fsdp2):
        found.append(values(engine.update(batch, objective).result()))
    for name in ("actor/loss", "actor/grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
    megatron.save(tmp_path / "of-megatron").result()
    fsdp2.save(tmp_path / "of-fsdp2").result()
    megatron.load(tmp_path / "of-fsdp2").result()
    fsdp2.load(tmp_path / "of-megatron").result()
    for engine in (megatron, fsdp2):
        engine.update(batch, objective).result()
    assert_close(kept(megatron, tmp_path / "a"), kept(fsdp2, tmp_path / "b"))
    np.testing.assert_allclose(scores(megatron, batch), scores(fsdp2, batch), atol=1e-4)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
@pytest.mark.parametrize(
    ("layout", "section"),
    [
        pytest.param(TP, SECTION, id="tp2"),
        pytest.param(PP, SECTION, id="pp2", marks=pytest.mark.nightly),
        pytest.param(TP, DORA, id="tp2, magnitudes", marks=pytest.mark.nightly),
    ],
)
def test_a_rollout_gets_merged_weights_or_the_adapter_as_peft_has_it(
    two, on_ranks, tiny, batch, objective, tmp_path, plain, layout, section, sync
):
    from peft import LoraConfig, get_peft_model
    from peft.utils import set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    config = DiskTransportConfig(name="disk", directory=str(tmp_path / "weights"))
    transport = PluginRef(kind="weight_transport", name="disk", config=config)
    section = attrs.evolve(section, sync=sync)
    engine = on_ranks(two, tiny, lora=section, transport=transport, **layout)
    engine.update(batch, objective).result()
    manifest = engine.weight_manifest(1).result()
    engine.send_weights(1, manifest).result()
    sent = dict(DiskTransport(config, PluginContext()).receiver().receive(manifest))
    merged_files = exported(engine, tmp_path / "out")
    base = load_file(tiny / "model.safetensors")
    assert merged_files.keys() == base.keys()
    assert any((merged_files[name] - tensor).abs().max() > 1e-4 for name, tensor in base.items())
    _, _, expected, _ = plain(tmp_path / "out", batch)
    np.testing.assert_allclose(scores(engine, batch), expected["log_probs"], atol=3e-5)
    if sync == "merged":
        assert manifest.kind == "full"
        torch.testing.assert_close(sent, merged_files, atol=0, rtol=0)
        return
    assert manifest.kind == "adapter"
    spec = AdapterSpec(**json.loads(json.dumps(attrs.asdict(manifest.adapter))))
    described = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        use_dora=spec.dora,
        target_modules=list(spec.target_modules),
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), described)
    outcome = set_peft_model_state_dict(model, sent)
    assert not outcome.unexpected_keys
    merged = model.merge_and_unload().state_dict()
    for name, tensor in merged_files.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", [TP], ids=["tp2"])
def test_in_bfloat16_matrices_are_float32_and_merging_is_before_the_cast(
    two, on_ranks, tiny, batch, objective, tmp_path, layout
):
    engine = on_ranks(two, tiny, lora=SECTION, dtype="bfloat16", **layout)
    start = kept(engine, tmp_path / "start")
    for _ in range(2):
        engine.update(batch, objective).result()
    state = kept(engine, tmp_path / "state")
    written = exported(engine, tmp_path / "out")
    base = load_file(tiny / "model.safetensors")
    for layer in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        name = f"model.layers.1.{layer}"
        a, b = (state[f"{name}.lora_{kind}.default.weight"] for kind in "AB")
        assert not torch.equal(a, start[f"{name}.lora_A.default.weight"])
        assert not torch.equal(b, b.bfloat16().float())
        exact = base[f"{name}.weight"].bfloat16().float() + 2.0 * (b @ a)
        torch.testing.assert_close(written[f"{name}.weight"], exact.bfloat16())
    expected = scores(engine, batch)
    engine.close()
    other = on_ranks(two, tiny, lora=SECTION, dtype="bfloat16", **layout)
    other.load(tmp_path / "state").result()
    np.testing.assert_array_equal(scores(other, batch), expected)


def test_a_state_without_the_adapter_is_refused_on_all_ranks(two, on_ranks, tiny, tmp_path):
    whole = on_ranks(two, tiny, **TP)
    whole.save(tmp_path).result()
    whole.close()
    with pytest.raises(CheckpointError, match="another model"):
        on_ranks(two, tiny, lora=SECTION, **TP).load(tmp_path).result()


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [TP, PP, CP], ids=["tp2", "pp2", "cp2"])
def test_a_critic_trains_its_adapter_and_its_head_alike_in_any_layout(
    two, on_ranks, tiny, batch, tmp_path, layout
):
    found = []
    for number, config in enumerate(({}, layout)):
        critic = on_ranks(two, tiny, head="value", lora=SECTION, **config)
        found.append((critic_norm(critic, batch), kept(critic, tmp_path / str(number))))
        critic.close()
    (norm, expected), (got_norm, got) = found
    assert {"value_head.weight", "trunk.layers.0.mlp.up_proj.lora_A.default.weight"} <= got.keys()
    assert got_norm == pytest.approx(norm, rel=1e-3)
    assert_close(got, expected)


def started(path, section, role="actor", trained=True, **config):
    """The engine alone in this process."""
    context = PluginContext(
        role=role, trained=trained, model=ModelSection(path=str(path), dtype="float32")
    )
    engine = MegatronOnCpu(MegatronConfig(lora=section, **config), context)
    engine.start()
    return engine


def test_layers_that_can_not_be_adapted_are_named_with_what_can(tiny, tmp_path):
    from transformers import Qwen3MoeConfig

    for target in ("lm_head", "nowhere"):
        section = LoraSection(rank=2, target_modules=(target,))
        with pytest.raises(ConfigError, match=rf"{target}(.|\n)*q_proj.*down_proj(.|\n)*fsdp2"):
            started(tiny, section)
    Qwen3MoeConfig(**EXPERTS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="layers of experts"):
        started(tmp_path, SECTION)


def test_a_reference_of_its_own_has_no_adapter_and_only_an_adapter_has_a_reference(tiny, batch):
    for role, section in (("ref", SECTION), ("actor", None)):
        engine = started(tiny, section, role=role, trained=role == "actor")
        try:
            with pytest.raises(ConfigError, match="lora"):
                engine.forward(batch, frozenset({"ref_log_probs"}))
        finally:
            engine.close()
    assert MegatronOnCpu.provides(MegatronConfig(lora=SECTION)) == {"ref_log_probs"}
    assert MegatronOnCpu.provides(MegatronConfig()) == frozenset()


def test_what_does_not_go_with_an_adapter_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="transformer_engine"):
        MegatronConfig(lora=SECTION, layers="transformer_engine")
    raw = {"model": {"path": "tiny"}, "rollout": "hf"}
    engine = {"name": "megatron", "lora": {"rank": 4, "sync": "adapter"}}
    with pytest.raises(PlanError, match=r"adapter alone.*'hf'"):
        make_plan(config_from_mapping({**raw, "actor": {"engine": engine}}, []).config)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{"expert_parallel_size": 2}, TP], ids=["ep2", "tp2"])
def test_attention_is_adapted_above_experts(
    two, on_ranks, other_engine, batch, objective, tmp_path, layout
):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(1)
    shape = Qwen3MoeConfig(**EXPERTS)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "model")
    found = []
    for engine in (
        on_ranks(two, tmp_path / "model", lora=ATTENTION, **layout),
        other_engine(tmp_path / "model", lora=ATTENTION),
    ):
        for _ in range(2):
            metrics = values(engine.update(batch, objective).result())
        found.append((metrics["actor/grad_norm"], kept(engine, tmp_path / str(len(found)))))
    (norm, got), (expected_norm, expected) = found
    assert norm == pytest.approx(expected_norm, rel=1e-3)
    assert_close(got, expected)
