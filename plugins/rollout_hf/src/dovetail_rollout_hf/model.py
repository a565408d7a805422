"""Loading the model and the tokenizer for generation."""

from __future__ import annotations

from typing import Any

from dovetail.errors import ConfigError, ModelError
from dovetail.sections import ModelSection
from dovetail_datasets import model_class, read_config, refuse_missing_model


def load_model(section: ModelSection, device: str) -> Any:
    """Load a causal language model or vision-language model, in the section's dtype and in evaluation mode.

    Raises:
        ModelError: the model does not exist or can't be read, its architecture is unknown, or a weight is not finite.
    """
    import torch

    refuse_missing_model(section.path)
    try:
        config = read_config(section)
        model = model_class(config).from_pretrained(
            section.path,
            config=config,
            dtype=getattr(torch, section.dtype),
            attn_implementation=section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
            revision=section.revision,
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises errors of any class
        raise ModelError(
            f"the model {section.path!r} can't be loaded: {error}",
            hint="set model.path to a directory with config.json and safetensors, or to a hub id",
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        # With such weights, generation itself would seem to be broken.
        if not bool(parameter.isfinite().all()):
            raise ModelError(
                f"the model {section.path!r} can't be used: its weight {name} has values that are NaN or infinite",
                hint="fetch or export the model again; if model.dtype is float16, try bfloat16, which does not overflow as soon",
            )
    return model


def load_tokenizer(section: ModelSection) -> Any:
    """Load the tokenizer from a model's files; None if the model has no tokenizer."""
    from transformers import AutoTokenizer

    path = section.tokenizer_path or section.path
    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=section.trust_remote_code, revision=section.revision
        )
    except (OSError, ValueError) as error:
        if section.tokenizer_path is None:
            return None
        raise ModelError(f"model.tokenizer_path={path!r} can't be loaded: {error}") from error
