"""Loads the run's tokenizer from a directory or the hub, with the config's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxtyping import Int64
from numpy import ndarray

from dovetail.errors import DataError, ModelError, nearest
from dovetail.interfaces import Tokenizer
from dovetail.sections import ModelSection
from dovetail_datasets.chat_template import set_arguments
from dovetail_datasets.models.classes import text_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
)
"""Names of tokenizer files; a tokenizer's directory contains at least one."""


def load_tokenizer(
    model: ModelSection, *, chat_template_args: Mapping[str, Any] | None = None
) -> Any:
    """Return the Hugging Face tokenizer of a model section, with the section's `chat_template` if set.

    Args:
        model: the model's section.
        chat_template_args: `data.chat_template_args`, which become default values in the chat template.

    Raises:
        ConfigError: the chat template does not read one of the arguments.
        ModelError: the directory is missing or holds no tokenizer, the hub id can't be reached, or the chat template is invalid.
    """
    from transformers import AutoTokenizer

    given = model.tokenizer_path or model.path
    path = str(Path(given).expanduser())
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    local = Path(path).is_dir()
    if local:
        _check_directory(Path(path), key, model.trust_remote_code)
    elif _is_path(given) or Path(path).is_file():
        raise _missing(Path(path), key)
    template = _chat_template(model.chat_template) if model.chat_template is not None else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        # The tokenizer of mistral-common has no `get_added_vocab`.
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        empty = len(tokenizer.get_vocab()) <= len(added)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others here
        raise _unloadable(path, key, error, local=local) from error
    if empty:
        # If the vocabulary's files are missing, transformers makes an empty tokenizer without an error.
        raise ModelError(
            f"the tokenizer in {key}={path!r} has no vocabulary",
            hint="save the tokenizer again with tokenizer.save_pretrained(directory)",
        )
    if template is not None:
        tokenizer.chat_template = template
    whose = "model.chat_template" if template is not None else f"the tokenizer in {key}={path!r}"
    set_arguments(tokenizer, chat_template_args or {}, of=whose)
    return tokenizer


def stop_tokens(model: ModelSection, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end generation, sorted: the end-of-sequence tokens of tokenizer, model config and generation config.

    Args:
        model: the model's section.
        tokenizer: the tokenizer of the run.

    Returns:
        The tokens; empty if neither config can be read.
    """
    from transformers import GenerationConfig

    config = text_config(model.path, model)
    found = [] if config is None else [config]
    with suppress(OSError, ValueError, KeyError):  # loading the model raises the error
        found += [GenerationConfig.from_pretrained(model.path, revision=model.revision)]
    return eos_of(tokenizer, *found) if found else ()


def eos_of(*sources: object) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of all these tokenizers and configs, sorted."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else map(int, value))
    return tuple(sorted(found))


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts of the special tokens, longer ones first."""
    added = (str(token) for token in added_tokens(tokenizer) if token.special)
    return tuple(sorted({*tokenizer.all_special_tokens, *added} - {""}, key=len, reverse=True))


def added_tokens(tokenizer: Tokenizer) -> list[Any]:
    """Return a tokenizer's added tokens; empty for mistral-common's, which never encodes control tokens from text."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    return list(added.values()) if isinstance(added, Mapping) else []


def check_ids(
    ids_T: Int64[ndarray, "T"], vocabulary: int | None, tokenizer: Tokenizer, place: str
) -> None:
    """Check that a model has an embedding for every token of a row.

    Args:
        ids_T: int64 [T], token ids.
        vocabulary: the number of the model's embeddings (`vocab_size`); None skips the check.
        tokenizer: the tokenizer of the ids.
        place: the row, for the error.

    Raises:
        DataError: a token has no embedding; the message names it.
    """
    largest = int(ids_T.max(initial=0))
    if vocabulary is not None and largest >= vocabulary:
        raise DataError(
            f"{place}: the row has the token {tokenizer.convert_ids_to_tokens(largest)!r} with the id {largest}; expected an id from 0 to "
            f"{vocabulary - 1}, since the model has {vocabulary:,} embeddings",
            hint="if tokens were added to the tokenizer, call model.resize_token_embeddings(len(tokenizer)) and save both; otherwise "
            "set model.tokenizer_path to the tokenizer that the model was trained with",
        )


def _is_path(path: str) -> bool:
    """Return whether a text must be a path, since a hub id is `name` or `organisation/name`."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or "\\" in path


def _missing(path: Path, key: str) -> ModelError:
    if path.is_file():
        return ModelError(
            f"{key}={str(path)!r} is a file, not a directory",
            hint=f"set {key} to the file's directory",
        )
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    close = nearest(path.name, names)
    hint = (
        f"did you mean {str(folder / close)!r}?"
        if close
        else f"set {key} to a directory in Hugging Face format, or to a hub id"
    )
    return ModelError(f"the directory {key}={str(path)!r} does not exist", hint=hint)


def _check_directory(path: Path, key: str, trust_remote_code: bool) -> None:
    if trust_remote_code or any((path / name).is_file() for name in TOKENIZER_FILES):
        return
    present = sorted(entry.name for entry in path.iterdir())
    # The path may be, for instance, a run's directory, whose model is in `final`.
    within = [path / name for name in present if (path / name / "tokenizer_config.json").is_file()]
    save = "save a tokenizer in it with tokenizer.save_pretrained(directory), or set model.tokenizer_path"
    raise ModelError(
        f"the directory {key}={str(path)!r} has no tokenizer; expected one of the files {', '.join(TOKENIZER_FILES)}; "
        f"the directory holds: {', '.join(present[:10]) or 'nothing'}",
        hint=f"did you mean {str(within[-1])!r}?" if within else save,
    )


def _unloadable(path: str, key: str, error: Exception, *, local: bool) -> ModelError:
    cause = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if "trust_remote_code" in str(error):
        return ModelError(
            f"the tokenizer of {key}={path!r} needs Python code from its repository, which model.trust_remote_code=false does not allow",
            hint="read the code, then set model.trust_remote_code=true",
        )
    if local:
        # transformers often doesn't name the invalid file. config.json counts, since it is read for the tokenizer's class.
        for file in (Path(path) / name for name in ("config.json", *TOKENIZER_FILES)):
            if file.suffix == ".json" and file.is_file():
                try:
                    json.loads(file.read_bytes())
                except ValueError as fault:
                    return ModelError(
                        f"the file {file} in {key}={path!r} is not valid JSON: {fault}",
                        hint="download or export the model again",
                    )
        return ModelError(
            f"the tokenizer in {key}={path!r} can't be loaded: {cause}",
            hint="save the tokenizer again with tokenizer.save_pretrained(directory)",
        )
    return ModelError(
        f"{key}={path!r} is not a local directory, and no tokenizer can be loaded from the hub under this id: {cause}",
        hint="check the spelling and the network; or download the model, and set {key} to its directory",
    )


def _chat_template(text: str) -> str:
    """Return the text if it is a template, else the content of the file that it names."""
    if "{%" in text or "{{" in text:
        return text
    path = Path(text).expanduser()
    if len(text) < 4096 and "\n" not in text and path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"model.chat_template={text!r} can't be read: {error}",
                hint="set model.chat_template to the path of a template file in UTF-8",
            ) from error
    raise ModelError(
        f"model.chat_template={text[:80]!r} is neither a Jinja template nor an existing file",
        hint="set model.chat_template to the path of a template file, or to a template with {% … %} or {{ … }}",
    )
