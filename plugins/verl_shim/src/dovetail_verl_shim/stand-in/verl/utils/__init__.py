"""Stand-ins for verl's helpers."""

from __future__ import annotations

from typing import Any


def hf_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Return the tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Return the processor of a model; None if the model has none."""
    from transformers import AutoProcessor

    try:
        made = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None
    return made if hasattr(made, "image_processor") else None
