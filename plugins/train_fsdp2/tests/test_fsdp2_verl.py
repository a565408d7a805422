"""Export of checkpoints of verl's FSDP workers: real ranks, real shards, and only tensors are unpickled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)

from dovetail.errors import CheckpointError, ModelError
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_torch_engines import safetensors_files
from dovetail_train_fsdp2.engine import Fsdp2Engine
from dovetail_train_fsdp2.verl import checkpoint_in, export_verl

pytest.importorskip("peft")
pytestmark = pytest.mark.nightly
CASES = {
    1: ("fsdp1-alone",),
    2: ("fsdp2", "fsdp1-lora", "fsdp2-lora", "fsdp2-critic", "fsdp2-critic-lora", "fsdp2-bfloat16"),
    4: ("fsdp2-uneven", "fsdp2-columns", "fsdp2-hybrid", "fsdp1", "fsdp1-hybrid"),
}


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """A folder with all cases' checkpoints, and the model that they start from.

    Its vocabulary of 301 and inner size of 50 leave uneven shards, and a head of one label an empty one.
    """
    base = tiny_model_and_tokenizer(
        tmp_path_factory.mktemp("base"), vocab_size=301, hidden_size=40, intermediate_size=50
    )
    out = tmp_path_factory.mktemp("verl")
    jobs = [",".join((str(world), *cases)) for world, cases in CASES.items()]
    script = Path(__file__).with_name("verl_saves.py")
    subprocess.run([sys.executable, script, base, out, *jobs], check=True, timeout=240)
    return out


@pytest.fixture
def saved(saves, tmp_path):
    """A copy of one checkpoint's folder, to damage."""
    shutil.copytree(saves / "fsdp2" / "global_step_7" / "actor", tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_it_is_the_model_that_was_saved(case, saves, tmp_path, monkeypatch):
    monkeypatch.setattr(
        safetensors_files.SafetensorsWriter.__init__, "__defaults__", (20_000,)
    )  # several files
    out = tmp_path / "out"
    write = Fsdp2Engine.foreign_export(saves / case)
    write(out)
    whole = torch.load(saves / f"{case}-whole.pt")
    dtype = torch.bfloat16 if "bfloat16" in case else torch.float32
    auto = AutoModelForTokenClassification if "critic" in case else AutoModelForCausalLM
    model, found = auto.from_pretrained(out, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == dtype
    expected = auto.from_config(model.config, dtype=dtype)
    expected.load_state_dict(whole)
    if "lora" not in case:
        assert all(torch.equal(whole[name], got) for name, got in model.state_dict().items())
    tokens = torch.randint(0, 300, (2, 9))
    with torch.no_grad():
        difference = (model.eval()(tokens).logits - expected.eval()(tokens).logits).abs().max()
    assert difference < 1e-5
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    described = saves / case / "global_step_7" / "actor" / "huggingface"
    one, other = (AutoTokenizer.from_pretrained(path) for path in (described, out))
    assert one.get_vocab() == other.get_vocab()
    assert one.chat_template == other.chat_template
    if "critic" not in case:
        assert GenerationConfig.from_pretrained(out).eos_token_id is not None


def test_training_starts_from_an_exported_critic(saves, tmp_path, make_engine):
    export_verl(checkpoint_in(saves / "fsdp2-critic"), tmp_path / "out")
    engine = make_engine(tmp_path / "out", head="value")
    weight = engine._runner.model.value_head.weight
    assert torch.equal(weight, load_file(tmp_path / "out" / "model.safetensors")["score.weight"])


def test_every_folder_of_a_checkpoint_can_be_named(saves):
    actor = saves / "fsdp2" / "global_step_7" / "actor"
    for path in (saves / "fsdp2", actor.parent, actor):
        assert checkpoint_in(path) == actor
    assert Fsdp2Engine.foreign_export(saves) is None


class Harmful:
    ran = False

    def __reduce__(self):
        return (setattr, (Harmful, "ran", True))


@pytest.mark.parametrize("marked", [False, True], ids=["unknown", "marked_safe_elsewhere"])
def test_nothing_but_tensors_is_unpickled(saved, tmp_path, marked):
    file = saved / "model_world_size_2_rank_1.pt"
    torch.save({"model.norm.weight": torch.ones(3), "x": Harmful()}, file)
    before = get_safe_globals()
    if marked:
        add_safe_globals([setattr, Harmful])
    marks = get_safe_globals()
    try:
        with pytest.raises(CheckpointError, match="unpickled"):
            export_verl(saved, tmp_path / "out")
        assert set(get_safe_globals()) == set(marks)
    finally:
        clear_safe_globals()
        add_safe_globals(before)
    assert not Harmful.ran
    assert not (tmp_path / "out").exists()


def edit(file, change):
    described = json.loads(file.read_text())
    change(described)
    file.write_text(json.dumps(described))


def truncate(folder):
    file = folder / "model_world_size_2_rank_1.pt"
    file.write_bytes(file.read_bytes()[:-2000])


def of_another_world(folder):
    """Files of two ranks of four under the names of two."""
    other = folder.with_name("of_four")
    for rank in range(2):
        shutil.copy(
            other / f"model_world_size_4_rank_{rank}.pt",
            folder / f"model_world_size_2_rank_{rank}.pt",
        )


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "model_world_size_2_rank_1.pt").unlink(), "file of rank 1"),
        (truncate, "rank_1.pt can't be read"),
        (
            lambda f: (f / "model_world_size_2_rank_1.pt").write_bytes(b""),
            "rank_1.pt can't be read",
        ),
        (of_another_world, r"'lm_head.weight' .* have size 152 .* expected shape \[301"),
        (
            lambda f: shutil.copy(
                f / "model_world_size_2_rank_1.pt", f / "model_world_size_3_rank_1.pt"
            ),
            "world sizes 2, 3",
        ),
        (
            lambda f: shutil.copy(
                f / "model_world_size_2_rank_1.pt", f / "model_world_size_2_rank_2.pt"
            ),
            "file of rank 2; .*world size 2",
        ),
        (lambda f: shutil.rmtree(f / "huggingface"), "has no huggingface/config.json"),
        (
            lambda f: edit(
                f / "huggingface/config.json",
                lambda c: c.update(num_hidden_layers=1, layer_types=["full_attention"]),
            ),
            "do not match .* the tensor 'model.layers.1",
        ),
        (
            lambda f: edit(f / "huggingface/config.json", lambda c: c.update(num_hidden_layers=1)),
            r"can't be loaded: .*num_hidden_layers",
        ),
        (
            lambda f: edit(f / "huggingface/config.json", lambda c: c.update(vocab_size=999)),
            r"has shape \(301, 40\); expected \(999, 40\)",
        ),
        (
            lambda f: (f / "huggingface/config.json").write_text('{"model_type": "no such"}'),
            "no such",
        ),
    ],
    ids=[
        "lacking",
        "truncated",
        "empty",
        "other_world",
        "two_worlds",
        "too_many",
        "no_config",
        "other_layers",
        "inconsistent_config",
        "other_shape",
        "unknown_model",
    ],
)
def test_what_can_not_be_exported_is_one_error(damage, problem, saves, saved, tmp_path):
    (tmp_path / "of_four").symlink_to(saves / "fsdp2-uneven" / "global_step_7" / "actor")
    damage(saved)
    with pytest.raises((CheckpointError, ModelError), match=problem):
        export_verl(saved, tmp_path / "out")


def test_an_adapter_without_its_scale_is_refused(saves, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(saves / "fsdp2-lora" / "global_step_7" / "actor", saved)
    (saved / "lora_adapter" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="lora_alpha"):
        export_verl(saved, tmp_path / "out")


def test_a_value_head_of_trl_is_refused(saved, tmp_path):
    for rank in range(2):
        file = saved / f"model_world_size_2_rank_{rank}.pt"
        torch.save({"v_head.summary.weight": torch.ones(1, 3)}, file)
    with pytest.raises(CheckpointError, match=r"'v_head.summary.weight'"):
        export_verl(saved, tmp_path / "out")


def test_a_step_that_is_gone_is_named(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(CheckpointError, match="names step 9"):
        checkpoint_in(tmp_path)
