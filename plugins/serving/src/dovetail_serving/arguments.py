"""Builds an engine's arguments: the user's merged with Dovetail's own, with the model and seed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, ModelError, nearest
from dovetail.interfaces import PluginContext
from dovetail.sections import ModelSection
from dovetail_datasets import refuse_missing_model
from dovetail_serving.section import ServingSection

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def merged_arguments(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], context: PluginContext
) -> dict[str, Any]:
    """Merge Dovetail's engine arguments over the user's `engine_args`; mappings under the same name are merged recursively.

    One warning names every argument with different values, and both values.

    Args:
        theirs: `rollout.engine_args`.
        ours: the arguments that Dovetail sets.
        context: the rollout's context; its logger logs overridden arguments.
    """
    clashes = list(_clashes(theirs, ours))
    if clashes:
        context.logger.warning(
            "rollout.engine_args: these values are overridden by Dovetail's own: %s",
            "; ".join(clashes),
        )
    return _over(theirs, ours)


def unknown_argument(name: str, known: Collection[str], *, engine: str) -> ConfigError:
    """Return the error for an argument that the engine does not accept.

    Args:
        name: the name of the argument.
        known: the names of valid arguments; the hint suggests the nearest.
        engine: the engine's name in messages.
    """
    close = nearest(name, known)
    return ConfigError(
        f"rollout.engine_args: {engine} has no engine argument {name!r}",
        hint=f"did you mean {close!r}?"
        if close
        else f"use an argument from {engine}'s documentation",
    )


def model_of(context: PluginContext) -> ModelSection:
    """Return the config of the model with which an engine starts.

    Raises:
        ModelError: no model is configured, or its directory does not exist.
    """
    if context.model is None:
        raise ModelError("the rollout was given no model", hint="set model.path in the config")
    refuse_missing_model(context.model.path)
    return context.model


def has_tokenizer(model: ModelSection) -> bool:
    """Return whether the model has a tokenizer, which engines need only for stop strings. True for a model from the Hugging Face hub."""
    directory = Path(model.tokenizer_path or model.path)
    return not directory.is_dir() or any((directory / name).is_file() for name in _TOKENIZER_FILES)


def replica_seed(engine: str, context: PluginContext) -> int:
    """Return the 31-bit seed of one replica's random generator, which differs between replicas.

    Args:
        engine: the plugin's name, on which the seed depends.
        context: the rollout's context, with the run's seed and the replica's rank.
    """
    words = f"{context.seed}/{engine}/{context.rank}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "little") >> 1


def starts_empty(config: ServingSection, context: PluginContext, *, kept: object = None) -> bool:
    """Return whether an engine may start with random weights, because a complete update precedes the first request.

    Such a start is faster. A tensor that the updates lack stays random; the run then notices that the engine's log-probabilities differ
    from the trainer's (`rollout.weight_check`).

    Args:
        config: the rollout's config. If this config joins servers or sets `engine_args.load_format`, the result is False.
        context: the rollout's context.
        kept: another reason why the weights on disk are needed, such as quantisation; falsy if there is none.
    """
    chosen = "load_format" in config.engine_args
    return context.weights_follow and not (chosen or config.urls or kept)


def _clashes(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted(ours.keys() & theirs.keys()):
        asked, own = theirs[name], ours[name]
        if isinstance(asked, Mapping) and isinstance(own, Mapping):
            yield from _clashes(asked, own, f"{prefix}{name}.")
        elif asked != own:
            yield f"{prefix}{name}={asked!r} (Dovetail sets {own!r})"


def _over(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    found = {**theirs, **ours}
    for name in ours.keys() & theirs.keys():
        if isinstance(theirs[name], Mapping) and isinstance(ours[name], Mapping):
            found[name] = _over(theirs[name], ours[name])
    return found
