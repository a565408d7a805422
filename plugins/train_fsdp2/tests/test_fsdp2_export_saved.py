"""Export of a training state without an engine: the files equal those that the engine exports."""

import filecmp
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from dovetail.errors import CheckpointError, ModelError
from dovetail.sections import ModelSection
from dovetail_datasets import ModelFacts
from dovetail_torch_engines import safetensors_files
from dovetail_train_fsdp2 import export as export_module
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.engine import Fsdp2Engine


def unstarted(engine):
    return Fsdp2Engine(engine.config, engine.context)


def same_files(one, other):
    names = sorted(file.name for file in one.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    differing = filecmp.cmpfiles(one, other, names, shallow=False)[1:]
    assert differing == ([], [])


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("tiny", {}),
        ("tiny", {"dtype": "bfloat16"}),
        ("untied", {}),
        ("tiny", {"head": "value"}),
        ("tiny", {"config": Fsdp2Config(lora=LoraSection(rank=4))}),
        (
            "untied",
            {"config": Fsdp2Config(lora=LoraSection(rank=4, dora=True)), "dtype": "bfloat16"},
        ),
        ("tiny", {"config": Fsdp2Config(lora=LoraSection(rank=4)), "head": "value"}),
    ],
    ids=["full", "bfloat16", "untied", "value", "lora", "dora", "value_lora"],
)
def test_it_is_the_model_that_the_engine_exports(
    path, settings, request, make_engine, tmp_path, monkeypatch
):
    if "config" in settings:
        pytest.importorskip("peft")
    monkeypatch.setattr(
        safetensors_files.SafetensorsWriter.__init__, "__defaults__", (20_000,)
    )  # several files
    engine = make_engine(request.getfixturevalue(path), **settings)
    with torch.no_grad():
        for number, parameter in enumerate(engine._runner.model.parameters()):
            if parameter.requires_grad:
                parameter.add_(0.01 * (number + 1))
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "one")
    other = unstarted(engine)
    monkeypatch.setattr(other, "start", pytest.fail)
    other.export_saved(tmp_path / "state", tmp_path / "two")
    same_files(tmp_path / "one", tmp_path / "two")
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    if settings.get("head") != "value":
        AutoModelForCausalLM.from_pretrained(tmp_path / "two")


GENERATION = {
    "greedy": {"do_sample": False},
    "temperature": {"temperature": 0.6},
    "temperature_zero": {"temperature": 0.0},
    "nucleus": {"temperature": 0.6, "top_p": 0.95},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "epsilon": {"epsilon_cutoff": 0.0003, "eta_cutoff": 0.0003},
    "greedy_flags": {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
    "sampling": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05},
    "length_penalty": {"length_penalty": 0.8},
    "early_stopping": {"early_stopping": True},
    "beams": {"num_beams": 4, "length_penalty": 0.8, "early_stopping": True},
    "cache": {"use_cache": False, "cache_implementation": "static"},
    "outputs": {"output_scores": True, "pad_token_id": -1},
}


@pytest.mark.parametrize("form", GENERATION)
def test_the_flags_of_generation_are_exported_as_they_are(form, tiny, make_engine, tmp_path):
    flags = {"eos_token_id": [2, 5], **GENERATION[form]}
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(flags))
    engine = make_engine(model)
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "one")
    unstarted(engine).export_saved(tmp_path / "state", tmp_path / "two")
    same_files(tmp_path / "one", tmp_path / "two")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "one").generation_config.to_dict()
    assert {name: exported[name] for name in flags} == flags
    given = GenerationConfig.from_pretrained(model).to_dict()
    assert exported | {"transformers_version": None} == given | {"transformers_version": None}


def test_flags_of_generation_that_transformers_does_not_read_are_refused_at_the_start(
    tiny, make_engine, tmp_path
):
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"num_return_sequences": 4}))
    with pytest.raises(ModelError, match="num_return_sequences"):
        make_engine(model)
    with pytest.raises(ModelError, match=r"generation_config\.json.*num_return_sequences"):
        ModelFacts.read(ModelSection(path=str(model)), None, None)


def test_a_state_of_several_ranks_comes_out_whole(two, tiny, on_ranks, make_engine, tmp_path):
    group = on_ranks(two, tiny)
    group.save(tmp_path / "state").result()
    group.export(tmp_path / "one").result()
    unstarted(make_engine(tiny)).export_saved(tmp_path / "state", tmp_path / "two")
    same_files(tmp_path / "one", tmp_path / "two")


def test_an_architecture_with_another_form_in_its_files_is_loaded(
    tiny, make_engine, tmp_path, monkeypatch
):
    engine = make_engine(tiny)
    engine.save(tmp_path / "state")
    monkeypatch.setattr(export_module, "stored_places", lambda *_: None)
    unstarted(engine).export_saved(tmp_path / "state", tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_state_of_another_model_is_refused(tiny, untied, make_engine, tmp_path):
    make_engine(untied).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="another model"):
        unstarted(make_engine(tiny)).export_saved(tmp_path / "state", tmp_path / "out")
    assert not (tmp_path / "out").exists()
