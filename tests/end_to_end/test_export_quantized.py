"""`dovetail export --quantize fp8`: what its files hold, and that the model computes what the exported one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dovetail.run.run import train
from dovetail_sdk.testing import tiny_model_and_tokenizer

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed here")

LARGEST = 448.0
"""Of float8_e4m3fn."""


@pytest.fixture
def exported(config: Path, tmp_path: Path, inside: Callable[..., Result]) -> tuple[Path, Path]:
    """The model of a run in bfloat16 after a step, and the same in fp8."""
    train(config, ["trainer.total_steps=1", "model.dtype=bfloat16", "data.val_files=[]"])
    run = str(tmp_path / "runs" / "tests" / "run")
    whole, small = tmp_path / "whole", tmp_path / "small"
    inside("export", run, str(whole))
    inside("export", run, str(small), "--quantize=fp8")
    return whole, small


def test_the_files_hold_rows_of_fp8_with_their_scales(exported: tuple[Path, Path]) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    whole, small = (load_file(folder / "model.safetensors") for folder in exported)
    linear = {name for name in whole if name.endswith("_proj.weight")}
    layers = json.loads((exported[0] / "config.json").read_text())["num_hidden_layers"]
    assert len(linear) == 7 * layers
    assert small.keys() == whole.keys() | {f"{name}_scale" for name in linear}
    library = BaseCompressor.get_value_from_registry("float-quantized")
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    for name, weight_OI in whole.items():
        if name not in linear:
            assert torch.equal(small[name], weight_OI), name
            continue
        codes_OI, scale_O1 = small[name], small[f"{name}_scale"]
        assert (codes_OI.dtype, scale_O1.dtype) == (torch.float8_e4m3fn, weight_OI.dtype)
        assert torch.equal(scale_O1, weight_OI.abs().amax(1, keepdim=True) / LARGEST)
        codes = (weight_OI / scale_O1).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        assert torch.equal(codes_OI.view(torch.uint8), codes.view(torch.uint8)), name
        parts = {"weight": codes_OI, "weight_scale": scale_O1}
        read_OI = library.decompress(parts, scheme)["weight"].float()
        # Three bits of mantissa, and bfloat16's rounding of quotient and product.
        bound = weight_OI.float().abs() * (2**-4 + 2**-7) + scale_O1.float() * 2**-10
        assert ((read_OI - weight_OI.float()).abs() <= bound).all(), name


def test_the_config_says_to_a_server_what_is_quantized(exported: tuple[Path, Path]) -> None:
    whole, small = (json.loads((folder / "config.json").read_text()) for folder in exported)
    found = small.pop("quantization_config")
    assert small == whole
    assert (found["quant_method"], found["format"]) == ("compressed-tensors", "float-quantized")
    assert (found["quantization_status"], found["ignore"]) == (
        "compressed",
        ["lm_head", "model.embed_tokens"],
    )
    [group] = found["config_groups"].values()
    assert group["targets"] == ["Linear"]
    facts = ("num_bits", "type", "strategy", "symmetric", "dynamic")
    assert [group["weights"][fact] for fact in facts] == [8, "float", "channel", True, False]
    activations = [group["input_activations"][fact] for fact in facts]
    assert activations == [8, "float", "token", True, True]
    assert "vllm serve DIR" in (exported[1] / "README.md").read_text()


def test_transformers_reads_it_and_computes_nearly_the_same(exported: tuple[Path, Path]) -> None:
    tokens_BT = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        whole, small = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(tokens_BT).logits
            for folder in exported
        )
    apart = (whole - small).float().std() / whole.float().std()
    assert 0 < apart < 0.1


@pytest.mark.parametrize(
    "other", [["--adapter"], ["--role=ref"], ["no_such=1"], ["--quantize=int3"]]
)
def test_what_can_not_be_quantized_is_refused_and_leaves_nothing(
    finished: Path, tmp_path: Path, inside: Callable[..., Result], other: list[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["export", str(finished), str(out), "--quantize=fp8", *other]
    assert inside(*arguments, check=False).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_experts_are_refused_since_a_server_would_look_for_their_scales(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from dovetail.errors import ModelError
    from dovetail_torch_engines.quantize import quantization

    dense = tiny_model_and_tokenizer(tmp_path / "dense", vocab_size=300)
    sizes = json.loads((dense / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
    shape = {name: sizes[name] for name in kept} | {"num_hidden_layers": 1, "num_experts": 2}
    network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, moe_intermediate_size=16))
    network.save_pretrained(tmp_path / "out")
    with pytest.raises(ModelError, match="experts"):
        quantization("fp8")(tmp_path / "out")
