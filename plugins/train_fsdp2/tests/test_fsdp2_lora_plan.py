"""The plan's description of adapters, compared with the engine's adapters for the same config."""

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError
from dovetail.planning.adapters import adapters_of
from dovetail.planning.plan import make_plan
from dovetail_console.memory import estimate_memory
from dovetail_torch_engines.preflight import adapter_targets
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection

pytest.importorskip("peft")


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 4},
        {"rank": 3, "dora": True},
        {"rank": 2, "target_modules": ["q_proj", "model.layers.1.mlp.up_proj"]},
        {"rank": 2, "target_modules": ["all-linear", "embed_tokens"], "dora": True},
        {"rank": 2, "target_modules": ["lm_head"]},
        {"rank": 2, "exclude_modules": r".*\.mlp\..*|model\.layers\.0\..*"},
    ],
)
def test_the_plan_counts_the_parameters_that_the_engine_trains(lora, make_engine, untied):
    mapping = {
        "model": {"path": str(untied), "dtype": "bfloat16"},
        "actor": {"engine": {"name": "fsdp2", "lora": lora}},
    }
    config = config_from_mapping(mapping).config
    plan = make_plan(config)
    (planned,) = adapters_of(plan)
    engine = make_engine(untied, config=config.actor.engine, dtype="bfloat16")
    model = engine._runner.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = engine._runner.adapter._layers
    assert planned.parameters == trained
    assert planned.count == len(layers)
    assert planned.layers == tuple(sorted({name.rpartition(".")[2] for name in layers}))
    assert planned.of == sum(p.numel() for p in model.parameters()) - trained
    memory = estimate_memory(plan).phases["update of actor"]
    assert memory["actor adapters"] == memory["actor gradients"] == 4 * trained
    assert memory["actor optimizer"] == 8 * trained


def test_a_name_that_fits_nothing_is_refused_beside_one_that_fits(tiny, make_engine):
    section = LoraSection(rank=2, target_modules=("q_proj", "v_porj"))
    with pytest.raises(ConfigError, match="'v_porj'"):
        make_engine(tiny, config=Fsdp2Config(lora=section))


def test_all_linear_may_stand_beside_other_names(tiny, make_engine):
    section = LoraSection(rank=2, target_modules=("all-linear", "embed_tokens"))
    with pytest.raises(ConfigError, match=r"'model\.embed_tokens'"):
        make_engine(tiny, config=Fsdp2Config(lora=section))


def test_a_router_of_experts_is_adapted_where_the_plan_lets_it_pass(make_engine, tmp_path):
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape = MixtralConfig(
        vocab_size=32, intermediate_size=8, num_hidden_layers=1, num_local_experts=2, **sizes
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    lora = {"rank": 2, "target_modules": ["q_proj", "gate"]}
    mapping = {
        "model": {"path": str(tmp_path)},
        "actor": {"engine": {"name": "fsdp2", "lora": lora}},
    }
    config = config_from_mapping(mapping).config
    assert list(adapter_targets(config, make_plan(config))) == []
    engine = make_engine(tmp_path, config=config.actor.engine)
    assert "model.layers.0.mlp.gate" in engine._runner.adapter._layers


@pytest.mark.parametrize("target", ["mlp", "lm_head", "model.embed_tokens"])
def test_what_no_adapter_can_be_put_on_is_refused_in_the_plans_own_words(tiny, make_engine, target):
    lora = {"rank": 2, "target_modules": ["q_proj", target]}
    mapping = {"model": {"path": str(tiny)}, "actor": {"engine": {"name": "fsdp2", "lora": lora}}}
    config = config_from_mapping(mapping).config
    (finding,) = adapter_targets(config, make_plan(config))
    with pytest.raises(ConfigError) as refused:
        make_engine(tiny, config=config.actor.engine)
    assert finding.message == f"actor.engine: {refused.value.message}"
    assert finding.hint == refused.value.hint
