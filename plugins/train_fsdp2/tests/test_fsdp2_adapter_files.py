"""Adapters in peft's format: written from a training state, loaded by peft, and trained further."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_engines import exported
from transformers import AutoModelForCausalLM

from dovetail.errors import CheckpointError, ConfigError
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.engine import Fsdp2Engine

peft = pytest.importorskip("peft")


def adapted(make_engine, model, **lora):
    return make_engine(model, config=Fsdp2Config(lora=LoraSection(rank=4, **lora)))


def moved(engine, by=0.01):
    with torch.no_grad():
        for number, parameter in enumerate(engine._runner.model.parameters()):
            if parameter.requires_grad:
                parameter.add_(by * (number % 7 + 1))
    return engine


def written(engine, tmp_path, name="adapter"):
    engine.save(tmp_path / f"{name}_state")
    other = Fsdp2Engine(engine.config, engine.context)
    other.export_adapter(tmp_path / f"{name}_state", tmp_path / name)
    return tmp_path / name


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 15)[None]).logits


KINDS = {
    "all-linear": {},
    "named": {"target_modules": ("q_proj", "layers.0.mlp.up_proj")},
    "stabilised": {"rank_stabilised": True, "alpha": 8.5},
    "dora": {"dora": True},
    "excluded": {"exclude_modules": r".*\.mlp\..*"},
    "embedding": {"target_modules": ("embed_tokens", "v_proj")},
}


@pytest.mark.parametrize("lora", KINDS.values(), ids=KINDS)
def test_peft_computes_what_the_merged_export_does(untied, make_engine, tmp_path, lora):
    engine = moved(adapted(make_engine, untied, **lora))
    directory = written(engine, tmp_path)
    engine.export(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    start = logits(base)
    found = logits(peft.PeftModel.from_pretrained(base, directory))
    torch.testing.assert_close(found, logits(merged), atol=1e-5, rtol=1e-5)
    assert (found - start).abs().max() > 1e-3


@pytest.mark.parametrize("lora", KINDS.values(), ids=KINDS)
def test_training_starts_from_it(untied, make_engine, tmp_path, lora):
    first = moved(adapted(make_engine, untied, **lora))
    directory = written(first, tmp_path)
    again = adapted(make_engine, untied, adapter_path=str(directory), **lora)
    one, two = exported(first, tmp_path / "one"), exported(again, tmp_path / "two")
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_two_ranks_start_from_it_too(two, untied, on_ranks, make_engine, tmp_path):
    first = moved(adapted(make_engine, untied))
    directory = written(first, tmp_path)
    group = on_ranks(two, untied, lora=LoraSection(rank=4, adapter_path=str(directory)))
    one, other = exported(first, tmp_path / "one"), exported(group, tmp_path / "two")
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_peft_saved_is_taken(untied, make_engine, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "theirs")
    expected = logits(model)
    targets = {"target_modules": ("q_proj", "v_proj"), "alpha": 16.0}
    engine = adapted(make_engine, untied, adapter_path=str(tmp_path / "theirs"), **targets)
    engine.export(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    np.testing.assert_allclose(logits(merged), expected, atol=1e-5)


def test_an_adapter_that_does_not_fit_is_refused(untied, make_engine, tmp_path):
    directory = written(adapted(make_engine, untied), tmp_path)

    def start(**lora):
        settings = {"rank": 4, "adapter_path": str(directory)} | lora
        make_engine(untied, config=Fsdp2Config(lora=LoraSection(**settings)))

    with pytest.raises(ConfigError, match=r"rank=4, but the config sets rank=8; alpha=32") as error:
        start(rank=8, alpha=16.0)
    assert error.value.hint == "set lora.rank=4 lora.alpha=32"
    with pytest.raises(ConfigError, match="not expected"):
        start(target_modules=("q_proj",))
    with pytest.raises(ConfigError, match="holds no adapter"):
        start(adapter_path=str(tmp_path / "none"))
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(
        json.dumps(config | {"rank_pattern": {"q_proj": 2}})
    )
    with pytest.raises(ConfigError, match="rank_pattern"):
        start()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "adapter_model.safetensors")
    name = min(tensors)
    save_file(
        tensors | {name: tensors[name][:, :1].contiguous()}, directory / "adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match="has shape"):
        start()
    (directory / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="can't be read"):
        start()


def test_models_without_one_alone_are_refused(tiny, make_engine, tmp_path):
    full = make_engine(tiny)
    with pytest.raises(ConfigError, match="no adapter to export"):
        full.export_adapter(tmp_path, tmp_path / "out")
    critic = make_engine(tiny, config=Fsdp2Config(lora=LoraSection(rank=4)), head="value")
    with pytest.raises(ConfigError, match="value head"):
        critic.export_adapter(tmp_path, tmp_path / "out")
    full.save(tmp_path / "state")
    engine = adapted(make_engine, tiny)
    with pytest.raises(CheckpointError, match="belongs to no adapter"):
        engine.export_adapter(tmp_path / "state", tmp_path / "out")
