"""Helpers for loading an update into an engine's model: hide the adapter layers, and refuse an update that lacks tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from dovetail.errors import WeightSyncError

_NAMED = 3
"""Number of missing tensors that an error names."""


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Replace the engine's adapter layers in a model by the layers that they wrap, during the `with` block.

    The parameters then have the names that the model's own loading code expects.

    Args:
        model: the engine's model, whose adapter layers hold the wrapped layer as `base_layer`.
    """
    around = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if isinstance(getattr(child, "base_layer", None), nn.Module)
    ]
    try:
        for parent, name, child in around:
            setattr(parent, name, child.base_layer)
        yield
    finally:
        for parent, name, child in around:
            setattr(parent, name, child)


def refuse_missing_weights(missing: Sequence[str]) -> None:
    """Refuse an update that left parameters of the model unchanged.

    Args:
        missing: the names of parameters that got no value, in order; may be empty.

    Raises:
        WeightSyncError: `missing` is not empty; the error names the first parameters.
    """
    if not missing:
        return
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    raise WeightSyncError(
        f"the weight update lacks parameters of the model: {', '.join(missing[:_NAMED])}{more}",
        hint="send every tensor of the model",
    )
