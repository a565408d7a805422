"""Checkpoints, exports and sent weights; and models that can't be loaded."""

import json

import pytest
import torch
from safetensors.torch import load_file
from trained_engines import Kept, parameters_of

from dovetail.errors import CheckpointError, ModelError, WeightSyncError
from dovetail.interfaces import (
    PluginContext,
    TensorSpec,
    WeightManifest,
)
from dovetail.sections import ModelSection
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.engine import Fsdp2Engine


def assert_bit_identical(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_state_without_an_optimizer_loads(tiny, make_engine, batch, tmp_path):
    engine = make_engine(tiny)
    engine.save(tmp_path)
    assert not (tmp_path / "moments").exists()
    resumed = make_engine(tiny)
    resumed.load(tmp_path)
    assert_bit_identical(parameters_of(engine), parameters_of(resumed))


def test_a_state_is_json_and_safetensors_alone(tiny, make_engine, batch, objective, tmp_path):
    engine = make_engine(tiny)
    engine.update(batch, objective)
    engine.save(tmp_path)
    assert {file.suffix for file in tmp_path.rglob("*.*")} == {".json", ".safetensors"}
    (moments,) = (tmp_path / "moments").glob("*.safetensors")
    stored = load_file(moments)
    for name in parameters_of(engine):
        assert stored[f"exp_avg.{name}"].abs().max() > 0
        assert stored[f"exp_avg_sq.{name}"].min() >= 0


def test_large_states_are_written_in_several_files(
    tiny, make_engine, batch, objective, tmp_path, monkeypatch
):
    monkeypatch.setattr("dovetail_train_fsdp2.checkpoint.FILE_BYTES", 20_000)
    engine = make_engine(tiny)
    engine.update(batch, objective)
    engine.save(tmp_path)
    files = [load_file(file) for file in (tmp_path / "moments").glob("*.safetensors")]
    assert len(files) > 3
    sizes = [[tensor.nbytes for tensor in file.values()] for file in files]
    assert all(sum(file) <= 20_000 or len(file) == 1 for file in sizes)
    resumed = make_engine(tiny)
    resumed.load(tmp_path)
    assert_bit_identical(engine._optimizer.moments(), resumed._optimizer.moments())


def test_parameters_without_a_gradient_keep_their_own_count_of_steps(
    tiny, make_engine, batch, unscored, objective, tmp_path
):
    engine = make_engine(tiny)
    engine.update(unscored, objective)
    engine.update(batch, objective)
    engine.save(tmp_path)
    resumed = make_engine(tiny)
    resumed.load(tmp_path)
    assert resumed._optimizer.steps == 2
    assert set(resumed._optimizer.parameter_steps().values()) == {1.0}
    engine.update(batch, objective)
    resumed.update(batch, objective)
    assert_bit_identical(parameters_of(engine), parameters_of(resumed))


def test_a_checkpoint_of_another_model_is_refused(tiny, make_engine, tmp_path):
    other = tiny_model_and_tokenizer(tmp_path / "other", vocab_size=300, layers=1)
    make_engine(other).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="another model"):
        make_engine(tiny).load(tmp_path / "state")


def test_a_checkpoint_of_another_optimizer_is_refused(
    tiny, make_engine, batch, objective, tmp_path
):
    engine = make_engine(tiny)
    engine.update(batch, objective)
    engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="optimizer"):
        make_engine(tiny, name="sgd").load(tmp_path)


def test_a_torn_checkpoint_is_named(tiny, make_engine, tmp_path):
    engine = make_engine(tiny)
    with pytest.raises(CheckpointError, match=r"training\.json"):
        engine.load(tmp_path)
    engine.save(tmp_path)
    (weights,) = (tmp_path / "weights").glob("*.safetensors")
    whole = weights.read_bytes()
    for torn in (whole[:100], whole[:-100]):
        weights.write_bytes(torn)
        with pytest.raises(CheckpointError, match="can't be read"):
            engine.load(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match="weights"):
        engine.load(tmp_path)
    facts = tmp_path / "training.json"
    facts.write_text(facts.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(CheckpointError, match="format 7"):
        engine.load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_a_hugging_face_model(tiny, make_engine, batch, objective, tmp_path, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = make_engine(tiny, dtype=dtype)
    engine.update(batch, objective)
    object.__setattr__(engine.context, "tokenizer", AutoTokenizer.from_pretrained(tiny))
    engine.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    narrow = {n: p.to(getattr(torch, dtype)) for n, p in parameters_of(engine).items()}
    assert_bit_identical(narrow, dict(model.named_parameters()))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 300


@pytest.mark.parametrize("tied", [True, False])
def test_weights_travel_once_each_under_their_hugging_face_names(make_engine, tmp_path, tied):
    from safetensors import safe_open

    path = tiny_model_and_tokenizer(tmp_path, vocab_size=300, tie_word_embeddings=tied, layers=1)
    transport = Kept()
    engine = make_engine(path, dtype="bfloat16", transport=transport)
    manifest = engine.weight_manifest(3)
    engine.send_weights(3, manifest)
    sent_manifest, sent = transport.manifest, transport.sent
    with safe_open(path / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert sent.keys() == stored.keys()
    assert ("lm_head.weight" in sent) == (not tied)
    assert sent_manifest.version == 3
    assert [spec.name for spec in manifest.tensors] == list(sent)
    for spec in manifest.tensors:
        assert spec == TensorSpec(
            name=spec.name, shape=tuple(stored[spec.name].shape), dtype="bfloat16"
        )
        assert torch.equal(sent[spec.name], stored[spec.name].bfloat16())
    assert manifest.total_bytes == sum(2 * tensor.numel() for tensor in stored.values())


def test_a_manifest_that_does_not_fit_is_refused(tiny, make_engine):
    engine = make_engine(tiny, transport=Kept())
    with pytest.raises(WeightSyncError, match="version 2"):
        engine.send_weights(2, engine.weight_manifest(1))
    wrong = WeightManifest(version=1, tensors=(TensorSpec(name="w", shape=(1,), dtype="float32"),))
    engine.send_weights(1, engine.weight_manifest(1))
    assert engine.context.transport.sent
    with pytest.raises(WeightSyncError, match="'w'"):
        engine.send_weights(1, wrong)


def load(path, **section):
    engine = Fsdp2Engine(
        Fsdp2Config(), PluginContext(role="actor", model=ModelSection(path=str(path), **section))
    )
    engine.start()


def test_models_that_can_not_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="no weights"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="can't be loaded"):
        load(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        load(tmp_path / "config.json")


def test_weights_that_are_missing_are_not_made_up(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(ModelError, match=r"lacks 1 .*'model\.layers\.1\.mlp"):
        load(tmp_path)


def test_a_hub_id_that_can_not_be_reached_names_both_readings(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no directory 'someone/something'(.|\n)*hub id"):
        load("someone/something")
