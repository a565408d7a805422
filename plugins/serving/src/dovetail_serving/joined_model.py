"""Checks that a server that a run joins serves the run's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import PluginContext
from dovetail_datasets import read_config

_SHAPE = ("hidden_size", "num_hidden_layers", "vocab_size")


def shape_of(text: object) -> dict[str, int]:
    """Return the sizes of a server's language model by name, such as `hidden_size`; `model_problems` compares them with the run's model.

    Args:
        text: the language model's config, with the field names of transformers.
    """
    return {name: int(getattr(text, name)) for name in _SHAPE}


def model_problems(found: Mapping[str, Any], context: PluginContext) -> list[str]:
    """Return the differences between the run's model and the model of a server that the run joins, as text for an error.

    Args:
        found: the server's description: `model` (the path), `shape` (from `shape_of`) and `architectures`.
        context: the rollout's context; if it has no model, nothing is compared.
    """
    model = context.model
    if model is None:
        return []
    ours = read_config(model)
    text = ours.get_text_config()
    problems = [
        f"its model ({found['model']}) has {name}={value}, but the run's model {model.path} has {getattr(text, name)}"
        for name, value in found["shape"].items()
        if getattr(text, name, value) != value
    ]
    if ours.architectures and list(ours.architectures) != found["architectures"]:
        problems.append(
            f"its model has the architecture {', '.join(found['architectures'])}, but the run's model {model.path} has "
            f"{', '.join(ours.architectures)}"
        )
    return problems
