"""Which models Megatron can train, and in which parallel layouts; read from a model's config, without Megatron or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, ModelError, nearest
from dovetail.sections import ModelSection
from dovetail_datasets import read_config as model_config
from dovetail_serving import experts_of
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.stages import check_last_stage, check_stages

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DENSE = ("llama", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
MODEL_TYPES = tuple(sorted((*DENSE, *MIXTURES)))
"""The model types of mbridge that are plain decoders with rotary positions and full attention."""
_UNREADABLE = (OSError, ValueError, ImportError, RuntimeError, LookupError)
_GATES = ("silu", "swish")
"""Names, in Hugging Face configs, of the SiLU activation, the only activation that mbridge builds."""
_SCALED = ("dynamic", "longrope", "yarn")
"""Unsupported types (`rope_type`) of rotary positions: their angles depend on the sequence's length, or they scale attention."""
_OTHER_ENGINE = "use the engine fsdp2, which trains every causal language model of transformers"


def read_config(section: ModelSection) -> PretrainedConfig:
    """Return the Hugging Face config of a model.

    Raises:
        ModelError: the config can't be read.
    """
    from huggingface_hub.errors import StrictDataclassError

    path = Path(section.path).expanduser()
    if section.path.startswith(("/", ".", "~")) and not path.is_dir():
        raise ModelError(
            f"model directory {section.path!r} does not exist",
            hint="check model.path (or critic.path, ref.path); a relative path starts in the directory where the command runs",
        )
    try:
        config: PretrainedConfig = model_config(section)
    except ConfigError:
        raise
    except (*_UNREADABLE, StrictDataclassError) as error:
        first, *more = str(error).strip().splitlines() or [type(error).__name__]
        message = f"{first} {more[0].strip()}" if first.endswith(":") and more else first
        raise ModelError(f"model {section.path!r} can't be loaded: {message}") from error
    return config


def check_architecture(hf: PretrainedConfig, section: ModelSection) -> None:
    """Check that Megatron computes the same as transformers for this model.

    Raises:
        ModelError: Megatron lacks the architecture (the error names the nearest one), or a part of it.
    """
    kind = str(hf.model_type)
    if kind not in MODEL_TYPES:
        alike = MIXTURES if experts_of(hf) else DENSE
        raise ModelError(
            f"the engine megatron does not support the architecture {kind!r} of {section.path}; expected one of "
            f"{', '.join(MODEL_TYPES)} (nearest: {nearest(kind, alike) or alike[0]!r})",
            hint=_OTHER_ENGINE,
        )
    lacking, rope = None, dict(getattr(hf, "rope_parameters", None) or {})
    if getattr(hf, "sliding_window", None) and getattr(hf, "use_sliding_window", True):
        lacking = f"attends within windows of {hf.sliding_window} tokens (sliding_window)"
    elif hf.hidden_act not in _GATES:
        lacking = f"has the activation {hf.hidden_act!r} (hidden_act)"
    elif experts_of(hf) and _mixes_dense_layers(hf):
        lacking = (
            "has dense layers between layers of experts (mlp_only_layers, decoder_sparse_step)"
        )
    elif kind != "qwen2" and (
        getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False)
    ):
        lacking = "has biases in its layers (attention_bias, mlp_bias)"
    elif rope.get("rope_type") in _SCALED or rope.get("partial_rotary_factor", 1) != 1:
        lacking = f"has rotary positions of type {rope.get('rope_type')!r}"
    if lacking is not None:
        raise ModelError(
            f"the model {section.path} {lacking}, which the engine megatron does not support",
            hint=_OTHER_ENGINE,
        )


def check_layout(hf: PretrainedConfig, config: MegatronConfig) -> None:
    """Check that the config's parallel sizes fit the model.

    Raises:
        ConfigError: a size does not divide its dimension of the model, or the model does not support it.
    """
    tp, cp, ep = (
        config.tensor_parallel_size,
        config.context_parallel_size,
        config.expert_parallel_size,
    )
    stages, experts = config.pipeline_parallel_size, experts_of(hf)
    if experts and cp > 1 and stages > 1:
        raise ConfigError(
            f"context_parallel_size={cp} can't be combined with pipeline_parallel_size={stages} in a mixture of experts",
            hint="set one of the two to 1; use tensor parallelism instead",
        )
    if ep > 1 and not experts:
        raise ConfigError(
            f"expert_parallel_size={ep} needs a mixture of experts, but a model of architecture {hf.model_type!r} has no experts",
            hint="leave expert_parallel_size out",
        )
    heads, inner = hf.num_attention_heads, getattr(hf, "moe_intermediate_size", None)
    divided = {
        "attention heads": heads,
        "key and value heads": hf.num_key_value_heads,
        "inner MLP features": inner or hf.intermediate_size,
    }
    _check_divides("tensor_parallel_size", tp, divided)
    _check_divides(
        "context_parallel_size", cp, {"attention heads per tensor-parallel rank": heads // tp}
    )
    _check_divides("expert_parallel_size", ep, {"experts": experts or 1})
    check_stages(hf.num_hidden_layers, stages)
    if config.last_stage_layers is not None and stages > 1:
        check_last_stage(config.last_stage_layers, hf.num_hidden_layers, stages)
    if not _all_have_tokens(hf.vocab_size, tp):
        fitting = [n for n in range(1, tp) if not tp % n and _all_have_tokens(hf.vocab_size, n)]
        raise ConfigError(
            f"tensor_parallel_size={tp} leaves some ranks without a token of the model's vocabulary of {hf.vocab_size}, which is "
            f"divided into {tp} parts of {-(-hf.vocab_size // tp)}",
            hint=f"use one of {', '.join(map(str, fitting))}",
        )


def _check_divides(key: str, size: int, divided: Mapping[str, int]) -> None:
    """Check that a parallel size divides every value of `divided`, whose keys name the values in the error.

    Raises:
        ConfigError: a value is not divisible.
    """
    for of, number in divided.items():
        if number % size:
            fitting = [
                n
                for n in range(1, min(64, *divided.values()) + 1)
                if not any(other % n for other in divided.values())
            ]
            raise ConfigError(
                f"{key}={size} does not divide the model's {number} {of}",
                hint=f"use {'one of ' if len(fitting) > 1 else ''}{', '.join(map(str, fitting))}",
            )


def _mixes_dense_layers(hf: PretrainedConfig) -> bool:
    return bool(getattr(hf, "mlp_only_layers", None)) or getattr(hf, "decoder_sparse_step", 1) != 1


def _all_have_tokens(vocabulary: int, tp: int) -> bool:
    """Return whether each of `tp` ranks gets a token of the vocabulary if, in rank order, each takes ⌈vocabulary / tp⌉ of those left."""
    return -(-vocabulary // tp) * (tp - 1) < vocabulary
