"""ModelFacts: vocabulary size, context length and end-of-sequence tokens of a model; and checks of model paths."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces import Tokenizer
from dovetail.sections import ModelSection
from dovetail_datasets.models.config import read_config
from dovetail_datasets.tokenizer import eos_of


@attrs.frozen(kw_only=True)
class ModelFacts:
    """Facts from a model's directory, without its weights."""

    vocab_size: int
    max_positions: int | None
    """Maximum length of prompt and response together, in tokens: the lower limit of model and engine; None if neither has a limit."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence tokens of the tokenizer, the model's config and its generation config, sorted."""

    @classmethod
    def read(
        cls, model: ModelSection, tokenizer: Tokenizer, max_model_len: int | None
    ) -> ModelFacts:
        """Read the facts from the model's files.

        Args:
            model: the rollout's model.
            tokenizer: the run's tokenizer, or None.
            max_model_len: the engine's own limit, or None.

        Raises:
            ModelError: the model does not exist, or its config can't be read.
        """
        from transformers import GenerationConfig

        try:
            config = read_config(model)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"the config of the model {model.path!r} can't be read: {error}",
                hint="correct the path, or download the model again",
            ) from error
        try:
            generation = GenerationConfig.from_pretrained(model.path, revision=model.revision)
        except OSError:
            generation = None  # generation_config.json is optional
        except ValueError as error:
            raise ModelError(
                f"generation_config.json of the model {model.path!r} is not valid: {error}",
                hint="correct the file, or remove it",
            ) from error
        text = config.get_text_config()
        limits = [max_positions(text), max_model_len]
        return cls(
            vocab_size=int(text.vocab_size),
            max_positions=min((int(n) for n in limits if n), default=None),
            eos_token_ids=eos_of(tokenizer, text, generation),
        )


def max_positions(text: object) -> int | None:
    """Return the model's context length in tokens, prompt and response together; None if its config gives none.

    The value is `max_position_embeddings`, multiplied by the factor of rope scaling. If the scaling has
    `original_max_position_embeddings`, the factor applies to this value instead, since `max_position_embeddings` may already be the
    product. The result is never less than `max_position_embeddings`.

    Args:
        text: the config of the text model, with transformers' names.
    """
    stated = getattr(text, "max_position_embeddings", None)
    if not stated:
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # Some models have separate rope settings for each kind of layer.
    ropes = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    scaled = [
        (part.get("original_max_position_embeddings") or stated) * (part.get("factor") or 1)
        for part in ropes
    ]
    return int(max(stated, *scaled))


def refuse_missing_model(path: str) -> None:
    """Refuse a path that can't be a hub id and is not a model directory.

    Raises:
        ModelError: the path is neither a hub id nor a model directory.
    """
    directory = Path(path)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(
                f"the directory {path!r} holds no model: config.json is missing",
                hint="set model.path to a directory in Hugging Face format",
            )
    elif directory.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(
            f"the model directory {path!r} does not exist",
            hint="set model.path to a model directory, or to a hub id such as Qwen/Qwen2.5-0.5B",
        )


def model_directory(path: str, section: ModelSection) -> Path | None:
    """Return the local directory of a model or a tokenizer: its path, or its folder in the hub's cache; None if there is none."""
    # A bad path raises a better error when the model is loaded.
    with suppress(OSError, RuntimeError, ValueError):
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=section.revision)
        return Path(cached).parent if isinstance(cached, str) else None
    return None
