"""The value head of a Hugging Face checkpoint. Legend: H hidden size."""

from __future__ import annotations

from torch import Tensor

from dovetail.errors import ModelError
from dovetail.sections import ModelSection
from dovetail_torch_engines.stored import StoredCheckpoint

VALUE_HEADS = (
    "score",
    "value_head",
    "v_head",
    "v_head.summary",
    "value_head.summary",
    "classifier",
)
"""Names of a head with one label in checkpoints: `score` in transformers, the other names in value models of RL libraries."""


def stored_value_head(
    checkpoint: StoredCheckpoint, section: ModelSection, hidden_size: int
) -> dict[str, Tensor]:
    """Return `weight` [1, hidden_size] and, if present, `bias` [1] of the checkpoint's value head; empty if it has none.

    Raises:
        ModelError: the head has more than one output, or is not a linear layer.
    """
    names = checkpoint.names
    name = next((name for name in VALUE_HEADS if f"{name}.weight" in names), None)
    if name is None:
        odd = sorted(key for key in names if key.split(".")[0] in {"v_head", "value_head", "score"})
        if odd:
            raise ModelError(
                f"model {section.path!r} has a value head of an unsupported form: its tensor is {odd[0]!r}",
                hint=f"use a critic whose head is one linear layer with one of the names {', '.join(VALUE_HEADS)}",
            )
        return {}
    stored = {
        key: checkpoint.tensor(f"{name}.{key}")
        for key in ("weight", "bias")
        if f"{name}.{key}" in names
    }
    if tuple(stored["weight"].shape) != (1, hidden_size):
        raise ModelError(
            f"the head {name!r} of model {section.path!r} has shape {tuple(stored['weight'].shape)}"
            f"; expected (1, {hidden_size})",
            hint="use a model with one label, or a plain language model, as the critic",
        )
    return stored
