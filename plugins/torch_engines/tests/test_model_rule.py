"""Models that can't be loaded because of their config, their weight files, or the tensors in the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail_sdk.testing import tiny_model_and_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("whole"), vocab_size=300)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> Path:
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(directory, max_shard_size="100KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def configure(model: Path, **settings: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def change(model: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Write the weights again, after `edit` has been at them."""
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


FAULTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no config": (lambda m: (m / "config.json").unlink(), ["holds no model", "config.json"]),
    "no such type": (
        lambda m: configure(m, model_type="of_no_such_type"),
        ["holds no model", "of_no_such_type"],
    ),
    "no weights": (
        lambda m: (m / "model.safetensors").unlink(),
        ["has no weights; expected a file model.safetensors"],
    ),
    "empty": (lambda m: cut(m / "model.safetensors", 0), ["model.safetensors (0 bytes)"]),
    "cut in the header": (
        lambda m: cut(m / "model.safetensors", 100),
        ["model.safetensors (100 bytes)", "truncated"],
    ),
    "cut in the tensors": (
        lambda m: cut(m / "model.safetensors", 200_000),
        ["model.safetensors (200,000 bytes)", "truncated"],
    ),
    "a pointer": (
        lambda m: (m / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        ["not a safetensors file"],
    ),
    "another hidden size": (
        lambda m: configure(m, hidden_size=32),
        ["in ", "model.safetensors has the shape [300, 64]; config.json requires [300, 32]"],
    ),
    "more layers": (
        lambda m: configure(m, num_hidden_layers=3, layer_types=["full_attention"] * 3),
        ["lack the tensor model.layers.2.", "config.json requires (and 11 more)"],
    ),
    "a tensor less": (
        lambda m: change(m, lambda tensors: tensors.pop("model.norm.weight")),
        ["the files in", "lack the tensor model.norm.weight, which config.json requires"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_policy_that_cannot_be_loaded_is_an_error_that_names_what_is_wrong(
    judge: Any, model: Path, fault: str
) -> None:
    spoil, words = FAULTS[fault]
    spoil(model)
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert finding.severity == "error"
    assert finding.message.startswith(f"model.path = {model} ")
    for part in words:
        assert part in finding.message
    assert "model.path=" in finding.hint


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FROZEN = {"algorithm": {"kl": {"in_loss": {"coef": 0.1}}}}


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_a_quantised_policy_is_an_error(judge: Any, model: Path, method: str) -> None:
    configure(model, quantization_config={**GPTQ, "quant_method": method, "load_in_4bit": True})
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert finding.severity == "error"
    assert "full precision" in finding.message


@pytest.mark.parametrize(
    ("runtime", "severity"), [({"name": "inline"}, "error"), ({"name": "ray"}, "warning")]
)
def test_a_quantised_reference_needs_the_package_that_loads_it(
    judge: Any, model: Path, monkeypatch: pytest.MonkeyPatch, runtime: Any, severity: str
) -> None:
    configure(model, quantization_config=GPTQ)
    sections = {**FROZEN, "ref": {"path": str(model)}, "runtime": runtime}
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_gptq.is_optimum_available", lambda: False
    )
    (finding,) = judge("model_missing", sections)
    assert (finding.severity, "optimum" in finding.message) == (severity, True)
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_gptq.GptqHfQuantizer.__init__", lambda *_, **__: None
    )
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_gptq.GptqHfQuantizer.validate_environment",
        lambda *_, **__: None,
    )
    assert judge("model_missing", sections) == []


def test_a_method_that_transformers_does_not_know_is_left_out_as_it_does(
    judge: Any, model: Path
) -> None:
    configure(model, quantization_config={"quant_method": "of an older library"})
    assert judge("model_missing", {"model": {"path": str(model)}}) == []


def pickled(model: Path, made: object, name: str = "pytorch_model.bin", **how: Any) -> Path:
    """Write what takes the place of the weights in safetensors."""
    (model / "model.safetensors").unlink()
    torch.save(made, model / name, **how)
    return model / name


class Runs:
    """Unpickled, it would make a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


PICKLES: dict[str, tuple[Callable[[Path, dict[str, torch.Tensor]], Any], str]] = {
    "code": (lambda m, t: pickled(m, {"x": Runs(m / "ran")}), "other than tensors"),
    "no pickle": (lambda m, t: pickled(m, t).write_bytes(b"garbage" * 100), "damaged"),
    "nothing": (lambda m, t: pickled(m, t).write_bytes(b""), "damaged"),
    "cut": (lambda m, t: cut(pickled(m, t), 5000), "damaged"),
    "a list": (lambda m, t: pickled(m, list(t.values())), "type list"),
    "no tensors": (lambda m, t: pickled(m, dict.fromkeys(t, 1)), "names to tensors"),
    "no names": (lambda m, t: pickled(m, dict(enumerate(t.values()))), "names to tensors"),
    "wrapped": (lambda m, t: pickled(m, {"state_dict": t}), "names to tensors"),
    "a tensor less": (lambda m, t: pickled(m, {**t, "model.norm.weight": None}), "the tensor model.norm.weight"),
    "another shape": (lambda m, t: pickled(m, {**t, "model.norm.weight": torch.ones(1)}), "the shape [1]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PICKLES)
def test_pickled_weights_that_cannot_be_loaded_are_named_and_run_nothing(
    judge: Any, model: Path, fault: str
) -> None:
    spoil, words = PICKLES[fault]
    spoil(model, load_file(model / "model.safetensors"))
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert finding.severity == "error"
    assert "pytorch_model.bin" in finding.message or "model.norm.weight" in finding.message
    assert words in finding.message
    assert not (model / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights_that_load_are_not_spoken_of(judge: Any, model: Path, legacy: bool) -> None:
    tensors = load_file(model / "model.safetensors")
    pickled(model, tensors, _use_new_zipfile_serialization=not legacy)
    assert judge("model_missing", {"model": {"path": str(model)}}) == []


@pytest.mark.parametrize(
    "index", ["", "{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "[" * 9999]
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_is_none_is_named(judge: Any, model: Path, name: str, index: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_text(index)
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert f"{model / name} can't be read" in finding.message


def test_a_pickled_part_that_is_missing_is_named(judge: Any, model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "part.bin"}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert f"{model / 'part.bin'} can't be read: No such file" in finding.message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "'bert' (BertForMaskedLM)"),
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "roberta"),
        ({"model_type": "electra", "architectures": ["ElectraForPreTraining"]}, "electra"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "t5"),
        ({"model_type": "bart", "architectures": None}, "bart"),
        ({"model_type": "clip", "architectures": None}, "clip"),
    ],
)
def test_a_model_that_does_not_write_from_left_to_right_is_named(
    judge: Any, model: Path, settings: dict[str, Any], words: str
) -> None:
    (model / "config.json").write_text(json.dumps(settings))
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert words in finding.message
    assert "causal language model" in finding.message


def test_a_model_of_its_own_code_says_that_it_needs_trust(judge: Any, model: Path) -> None:
    configure(
        model,
        model_type="own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    (model / "own.py").write_text("raise SystemExit('it ran')\n")
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert "Python code" in finding.message
    assert "model.trust_remote_code=true" in finding.hint


def test_a_policy_that_is_not_there_is_an_error(judge: Any, tmp_path: Path) -> None:
    (finding,) = judge("model_missing", {"model": {"path": str(tmp_path / "nowhere")}})
    assert finding.message.startswith("model.path = ")


@pytest.mark.parametrize(
    ("settings", "edit"),
    [
        ({}, lambda tensors: None),
        ({"tie_word_embeddings": False}, lambda t: t.update({"lm_head.weight": torch.ones(300, 64)})),
        ({}, lambda t: t.update({"of.nobody": torch.ones(2)})),
        ({}, lambda t: [t.update({name[6:]: t.pop(name)}) for name in list(t) if name[:6] == "model."]),
    ],
    ids=["as it was saved", "untied", "a tensor more", "its base alone"],
)  # fmt: skip
def test_a_model_that_loads_is_not_spoken_of(
    judge: Any, model: Path, settings: dict[str, Any], edit: Any
) -> None:
    from transformers import AutoModelForCausalLM

    configure(model, **settings)
    change(model, edit)
    assert judge("model_missing", {"model": {"path": str(model)}}) == []
    _, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not info["missing_keys"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.unlink(), "can't be read"),
        (lambda file: cut(file, 5000), "truncated"),
        (lambda file: save_file({"x": torch.ones(1)}, file), "lacks the tensor"),
    ],
    ids=["missing", "truncated", "another"],
)
def test_a_shard_that_is_missing_or_broken_is_named(
    judge: Any, sharded: Path, tmp_path: Path, spoil: Any, words: str
) -> None:
    model = Path(shutil.copytree(sharded, tmp_path / "model"))
    section = {"model": {"path": str(model)}}
    assert judge("model_missing", section) == []
    shard = sorted(model.glob("model-*.safetensors"))[1]
    spoil(shard)
    (finding,) = judge("model_missing", section)
    assert f"{shard} " in finding.message
    assert words in finding.message


def test_an_index_that_cannot_be_read_is_named(judge: Any, sharded: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(sharded, tmp_path / "model"))
    index = model / "model.safetensors.index.json"
    index.write_text("{}")
    (finding,) = judge("model_missing", {"model": {"path": str(model)}})
    assert f"{index} can't be read" in finding.message


def test_a_critic_needs_no_output_layer_and_is_named_by_its_key(
    judge: Any, whole: Path, tmp_path: Path
) -> None:
    critic = tiny_model_and_tokenizer(
        tmp_path / "critic", vocab_size=300, head="value", tie_word_embeddings=False
    )
    run = {
        "model": {"path": str(whole)},
        "algorithm": {"advantage": "gae"},
        "critic": {"path": str(critic)},
    }
    assert judge("model_missing", run) == []
    cut(critic / "model.safetensors", 200_000)
    (finding,) = judge("model_missing", run)
    assert finding.message.startswith(f"critic.path = {critic} can't be loaded")


def test_of_weights_that_change_their_form_in_loading_the_embedding_is_compared(
    judge: Any, tmp_path: Path
) -> None:
    """Mixtral's experts are one tensor each on disk, and one tensor together in memory."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    section = {"model": {"path": str(tmp_path)}}
    assert judge("model_missing", section) == []
    configure(tmp_path, hidden_size=32)
    (finding,) = judge("model_missing", section)
    assert "embed_tokens.weight" in finding.message


def test_a_stop_token_that_the_model_does_not_have_is_a_warning(judge: Any, model: Path) -> None:
    def found(ids: str) -> Any:
        sections = {"model": {"path": str(model)}}
        return judge("turn_end_not_stopped", sections, f"rollout.stop_token_ids={ids}")

    assert found("[0, 299]") == []
    (finding,) = found("[299, 300, -1]")
    assert finding.severity == "warning"
    assert "[300, -1]" in finding.message
