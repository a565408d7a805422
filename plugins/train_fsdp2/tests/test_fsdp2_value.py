"""Value models: layouts, recomputation, and value heads in checkpoints."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trained_engines import assert_same_metrics

from dovetail.errors import ModelError
from dovetail.interfaces import PluginContext
from dovetail.plugins import objective_spec
from dovetail.sections import ModelSection
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.engine import Fsdp2Engine

VALUES = frozenset({"values"})
OBJECTIVE = objective_spec("value", clip=0.05)


def values_of(engine, batch):
    return engine.forward(batch, VALUES)["values"].values


@pytest.mark.parametrize("share", ["always", "never"])
@pytest.mark.parametrize("budget", [1, 40])
def test_values_and_gradients_do_not_depend_on_layout_and_cut(
    classifier, make_engine, gradients, valued, share, budget
):
    whole = make_engine(classifier, head="value", config=Fsdp2Config(share_prompts="never"))
    cut = make_engine(
        classifier, head="value", config=Fsdp2Config(share_prompts=share), budget=budget
    )
    np.testing.assert_allclose(values_of(cut, valued), values_of(whole, valued), atol=2e-6)
    one, metrics = gradients(whole, valued, OBJECTIVE)
    other, other_metrics = gradients(cut, valued, OBJECTIVE)
    assert max(grad.abs().max() for grad in one.values()) > 1e-3
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)
    assert_same_metrics(metrics, other_metrics, rel=1e-4)


def test_the_head_is_float32_whatever_the_compute_dtype(classifier, make_engine, valued):
    exact = values_of(make_engine(classifier, head="value"), valued)
    engine = make_engine(classifier, head="value", dtype="bfloat16")
    assert engine._runner.model.value_head.weight.dtype == torch.float32
    narrow = values_of(engine, valued)
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, exact, atol=0.05)
    # Values have more than bfloat16's eight bits.
    kept = narrow[narrow != 0]
    assert (torch.from_numpy(kept).bfloat16().float().numpy() != kept).any()


def test_metrics_are_the_critics(tiny, make_engine, valued):
    metrics = make_engine(tiny, head="value", lr=1e-3).update(valued, OBJECTIVE)
    assert all(name.startswith("critic/") for name in metrics)
    assert metrics["critic/lr"].value == 1e-3
    assert metrics["critic/grad_norm"].value > 0


def renamed(directory, target, names):
    """A copy of a checkpoint with other names for some tensors; None leaves one out."""
    weights = load_file(directory / "model.safetensors")
    kept = {names.get(name, name): tensor for name, tensor in weights.items()}
    kept.pop(None, None)
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


@pytest.mark.parametrize("name", ["value_head", "v_head", "v_head.summary"])
def test_heads_of_other_libraries_are_found(classifier, make_engine, valued, tmp_path, name):
    names = {f"score.{key}": f"{name}.{key}" for key in ("weight", "bias")}
    expected = values_of(make_engine(classifier, head="value"), valued)
    path = renamed(classifier, tmp_path, names)
    np.testing.assert_array_equal(values_of(make_engine(path, head="value"), valued), expected)


def test_a_head_without_a_bias_has_none(classifier, make_engine, tmp_path):
    engine = make_engine(renamed(classifier, tmp_path, {"score.bias": None}), head="value")
    assert not engine._runner.model.value_head.bias.any()
    assert engine._runner.model.value_head.weight.all()


def test_a_head_in_several_files_is_found(classifier, make_engine, valued, tmp_path):
    weights = load_file(classifier / "model.safetensors")
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in weights.items():
        parts["b.safetensors" if "score" in name else "a.safetensors"][name] = tensor
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    places = {name: file for file, tensors in parts.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    (tmp_path / "config.json").write_text((classifier / "config.json").read_text())
    expected = values_of(make_engine(classifier, head="value"), valued)
    np.testing.assert_array_equal(values_of(make_engine(tmp_path, head="value"), valued), expected)


def test_a_head_that_is_none_is_refused(classifier, make_engine, tmp_path):
    weights = load_file(classifier / "model.safetensors")
    weights["score.weight"] = torch.zeros(2, 32)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((classifier / "config.json").read_text())
    with pytest.raises(ModelError, match=r"shape \(2, 32\); expected \(1, 32\)"):
        make_engine(tmp_path, head="value")
    odd = {"score.weight": "v_head.0.weight", "score.bias": "v_head.0.bias"}
    (tmp_path / "odd").mkdir()
    path = renamed(classifier, tmp_path / "odd", odd)
    with pytest.raises(ModelError, match="unsupported form"):
        make_engine(path, head="value")


def test_weights_of_the_base_that_are_missing_are_not_made_up(classifier, make_engine, tmp_path):
    path = renamed(classifier, tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"lacks 1 .*'model\.layers\.1\.mlp"):
        make_engine(path, head="value")


def test_a_head_of_0_is_said_in_the_log(tiny, classifier):
    said = []

    class Log:
        def info(self, text):
            said.append(text)

    for path in (classifier, tiny):
        context = PluginContext(
            role="critic",
            head="value",
            model=ModelSection(path=str(path), dtype="float32"),
            logger=Log(),
        )
        Fsdp2Engine(Fsdp2Config(), context).start()
    assert len(said) == 1
    assert "value of 0" in said[0]
    assert str(tiny) in said[0]


def test_an_export_is_a_token_classifier_of_one_label(classifier, make_engine, valued, tmp_path):
    from transformers import AutoModelForTokenClassification

    engine = make_engine(classifier, head="value", lr=1e-2)
    engine.update(valued, OBJECTIVE)
    engine.export(tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.num_labels == 1
    head = engine._runner.model.value_head
    assert torch.equal(model.score.weight, head.weight)
    assert torch.equal(model.score.bias, head.bias)
    expected = values_of(engine, valued)
    assert not np.array_equal(expected, values_of(make_engine(classifier, head="value"), valued))
    np.testing.assert_array_equal(values_of(make_engine(tmp_path, head="value"), valued), expected)


def test_an_architecture_without_a_classifier_keeps_its_head_too(make_engine, valued, tmp_path):
    from transformers import AutoModelForCausalLM, CohereConfig

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "start")
    engine = make_engine(tmp_path / "start", head="value", lr=1e-2)
    engine.update(valued, OBJECTIVE)
    engine.export(tmp_path / "end")
    expected = values_of(engine, valued)
    assert expected.any()
    again = make_engine(tmp_path / "end", head="value")
    np.testing.assert_array_equal(values_of(again, valued), expected)


def test_a_critic_under_an_adapter_trains_its_head_too(classifier, make_engine, valued, tmp_path):
    settings = {"head": "value", "lr": 1e-2, "config": Fsdp2Config(lora=LoraSection(rank=2))}
    engine = make_engine(classifier, **settings)
    trained = {n for n, p in engine._runner.model.named_parameters() if p.requires_grad}
    assert {n for n in trained if "lora_" not in n} == {"value_head.weight", "value_head.bias"}
    engine.update(valued, OBJECTIVE)
    engine.save(tmp_path / "state")
    engine.update(valued, OBJECTIVE)
    expected = values_of(engine, valued)
    other = make_engine(classifier, **settings)
    other.load(tmp_path / "state")
    other.update(valued, OBJECTIVE)
    np.testing.assert_array_equal(values_of(other, valued), expected)
    engine.export(tmp_path / "model")
    merged = values_of(make_engine(tmp_path / "model", head="value"), valued)
    np.testing.assert_allclose(merged, expected, atol=2e-6)
