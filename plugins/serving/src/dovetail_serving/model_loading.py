"""A model inside an engine while an update is loaded into it: without its room for adapters, and refused where tensors are missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from dovetail.errors import WeightSyncError

_NAMED = 3
"""How many of the missing tensors an error names."""


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Show a model, within the block, as it was before its engine put a layer with room for adapters around each of its own.

    The parameters are the same, and have the names under which models know how to load them.

    Args:
        model: the engine's; layers with room hold the one that they are around as `base_layer`.
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
    """Refuse an update that left parameters of the model as they were.

    Args:
        missing: what got nothing, in the order in which it is named; empty where everything came.

    Raises:
        WeightSyncError: there are some; the first are named.
    """
    if not missing:
        return
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    raise WeightSyncError(
        f"the update has nothing for {', '.join(missing[:_NAMED])}{more}",
        hint="send every tensor of the model",
    )
