"""Quantization of an exported model, file by file on the CPU, into the compressed-tensors format that vLLM and SGLang read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, ModelError
from dovetail.sections import ModelSection
from dovetail_datasets import read_config, read_shape, takes_images

SCHEMES = {"fp8": "FP8_DYNAMIC"}
"""Names of compressed-tensors' schemes, by the quantization method of an export. `fp8`: E4M3 weights with a scale for each row;
activations are quantized token by token at run time, without calibration data."""
_FORMAT = "float-quantized"


def quantization(method: str) -> Callable[[Path], None]:
    """Return a function that quantizes a model in Hugging Face format in place, in its folder.

    Raises:
        ConfigError: there is no such method, or the package compressed-tensors is not installed.
        ModelError: the returned function raises it if the model takes images or has layers that can't be quantized, such as experts.
    """
    if method not in SCHEMES:
        raise ConfigError(
            f"--quantize={method} is not a known method; expected {', '.join(SCHEMES)}",
            hint=f"export with --quantize={next(iter(SCHEMES))}",
        )
    try:
        import compressed_tensors  # noqa: F401 - asked before anything is written
    except ImportError as error:
        raise ConfigError(
            f"--quantize={method} needs the package compressed-tensors, which can't be imported here: {error}",
            hint="pip install 'dovetail-rl[quantize]'",
        ) from error
    return partial(_quantize, scheme_name=SCHEMES[method])


def _quantize(model: Path, scheme_name: str) -> None:
    """Quantize a model's files in place; for errors see `quantization`."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from safetensors.torch import load_file, save_file

    section = ModelSection(path=str(model))
    if takes_images(read_config(section)):
        raise ModelError(
            "--quantize can't be used for a model that takes images: servers differ in which layers of its vision tower they "
            "expect quantized",
            hint="export without --quantize, and let the server quantize: vllm serve DIR --quantization fp8",
        )
    layers = read_shape(section).layers
    linear = {name for name, layer in layers.items() if layer.linear}
    scheme: Any = preset_name_to_scheme(scheme_name, ["Linear"])
    sizes = 0
    places: dict[str, str] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors = _quantized_tensors(load_file(file), linear, scheme)
        save_file(tensors, partial := file.with_suffix(".partial"), {"format": "pt"})
        partial.replace(file)
        sizes += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, file.name)
    index = model / "model.safetensors.index.json"
    if index.exists():
        _dump(index, {"metadata": {"total_size": sizes}, "weight_map": places})
    written = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=_FORMAT,
        quantization_status="compressed",
        ignore=sorted(layers.keys() - linear),
    )
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = written.model_dump(mode="json")
    _dump(model / "config.json", config)


def _dump(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _quantized_tensors(tensors: Mapping[str, Any], linear: set[str], scheme: Any) -> dict[str, Any]:
    """Return a file's tensors, with each linear layer's weight [out, in] as float8_e4m3fn, beside a `weight_scale` [out, 1]."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    compressor: Any = BaseCompressor.get_value_from_registry(_FORMAT)
    found = {}
    for name, tensor in tensors.items():
        if ".experts." in name or tensor.ndim > 2:
            raise ModelError(
                f"--quantize can't quantize the tensor {name}, although servers expect it quantized: it belongs to a mixture of "
                "experts or is not a matrix",
                hint="export without --quantize, and let the server quantize: vllm serve DIR --quantization fp8",
            )
        layer = name.removesuffix(".weight")
        if layer == name or layer not in linear:
            found[name] = tensor
            continue
        low, high = tensor.aminmax(dim=1, keepdim=True)
        scale, _ = calculate_qparams(low, high, scheme.weights)
        parts = compressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        found |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    return found
