"""Where the files of models are on this machine, and what their configs say."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.sections import ModelSection


def model_directory(path: str, section: ModelSection) -> Path | None:
    """Where a model or a tokenizer lies on this machine: its directory, or the hub's cache of it; None where it does not."""
    # What is wrong with a path is said where it is read.
    with suppress(OSError, RuntimeError, ValueError):
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=section.revision)
        return Path(cached).parent if isinstance(cached, str) else None
    return None


def text_config(directory: Path, section: ModelSection) -> Any:
    """The config of a model's text part, in the words of transformers; None where it can't be read."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=section.trust_remote_code
        )
        return found.get_text_config()
    except Exception:  # noqa: BLE001 - a config can't be read for many reasons, and another rule says which
        return None
