"""Facts from a model's config: its text part, the transformers class that loads it, and whether it takes images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ModelError
from dovetail.sections import ModelSection
from dovetail_datasets.models.config import read_config


def text_config(path: str | Path, section: ModelSection) -> Any:
    """Return the transformers config of a model's text part; None if its files are not on this machine or can't be read.

    Args:
        path: the model's directory or hub id, used in place of `section.path`.
        section: the model section, with the revision and the config overrides.
    """
    try:
        found = read_config(attrs.evolve(section, path=str(path)), local_files_only=True)
        return found.get_text_config()
    except Exception:  # noqa: BLE001 - a config can't be read for many reasons; what loads the model says which
        return None


def model_class(config: object) -> Any:
    """Return the auto class of transformers that loads a model with its language-model head, and its vision tower if it has one.

    Args:
        config: a transformers config.

    Returns:
        `AutoModelForImageTextToText` for models that no other class loads; `AutoModelForCausalLM` for all others.

    Raises:
        ModelError: the model is an encoder or an encoder-decoder, which may load, but attends to the tokens that it should predict.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    known, vision = (
        type(config) in mapping
        for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    )
    names = getattr(config, "architectures", None) or ()
    masked = any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in names)
    own_code = getattr(config, "auto_map", None)
    if masked or getattr(config, "is_encoder_decoder", False) or not (known or vision or own_code):
        kind = getattr(config, "model_type", None)
        named = f" ({', '.join(names)})" if names else ""
        raise ModelError(
            f"the model type {kind!r}{named} is not a causal language model",
            hint="choose a model that generates text from left to right, such as a Qwen or Llama model",
        )
    return AutoModelForImageTextToText if vision and not known else AutoModelForCausalLM


def image_token_of(config: object) -> int | None:
    """Return the image placeholder token; None if the model has none."""
    for name in ("image_token_id", "image_token_index"):
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return None


def takes_images(config: object) -> bool:
    """Return whether a model with this config takes images: it has a vision tower and a placeholder token."""
    return getattr(config, "vision_config", None) is not None and image_token_of(config) is not None
