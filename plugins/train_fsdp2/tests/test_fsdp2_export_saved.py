"""A model out of a training state that no engine has loaded: the same files as the engine that trained it exports."""

import filecmp
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.errors import CheckpointError
from dovetail.training import safetensors_files
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_train_fsdp2 import export as export_module
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection
from dovetail_train_fsdp2.engine import Fsdp2Engine


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("untied"), vocab_size=300, tie_word_embeddings=False
    )


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
