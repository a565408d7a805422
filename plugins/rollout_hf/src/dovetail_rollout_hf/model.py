"""Loading the model and the tokenizer that generation needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.config.sections import ModelSection
from dovetail.errors import ModelError


def load_model(section: ModelSection, device: str) -> Any:
    """Load a causal language model in the section's dtype, in evaluation mode.

    Raises:
        ModelError: there is no such directory, hub model or architecture, or it can't be read.
    """
    import torch
    from transformers import AutoModelForCausalLM

    _refuse_missing(section.path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            section.path,
            dtype=getattr(torch, section.dtype),
            attn_implementation=section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
            revision=section.revision,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(
            f"the model {section.path!r} can't be loaded: {error}",
            hint="set model.path to a directory with config.json and safetensors, or to a hub id",
        ) from error
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(section: ModelSection) -> Any:
    """Load the tokenizer of a model where the context has none; None where the model ships none."""
    from transformers import AutoTokenizer

    path = section.tokenizer_path or section.path
    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=section.trust_remote_code, revision=section.revision
        )
    except (OSError, ValueError) as error:
        if section.tokenizer_path is None:
            return None
        raise ModelError(f"the tokenizer {path!r} can't be loaded: {error}") from error


def _refuse_missing(path: str) -> None:
    """A path that can't be a hub id and is no model directory gets an error that says so."""
    directory = Path(path)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(
                f"the directory {path!r} holds no model: config.json is missing",
                hint="set model.path to a directory in Hugging Face format",
            )
    elif directory.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(
            f"there is no directory {path!r}",
            hint="set model.path to a model directory, or to a hub id such as Qwen/Qwen2.5-0.5B",
        )
