"""Checks whether an engine can apply an adapter before the adapter is sent."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import WeightSyncError
from dovetail.interfaces import WeightManifest

EMBEDDINGS = frozenset(
    {"embed_in", "embed_tokens", "tok_embeddings", "word_embeddings", "wpe", "wte"}
)
"""Module names of embeddings (the last part of the path), whose adapters differ in form from adapters of linear layers."""
_MERGED = "or send merged weights (actor.engine.lora.sync: merged)"


def unapplied(dora: bool, targets: Sequence[str], layers: Sequence[str] | None) -> str | None:
    """Return why an engine can't apply an adapter. The engine applies only plain LoRA adapters of linear layers.

    Args:
        dora: whether the adapter is a DoRA adapter (arXiv 2402.09353).
        targets: names of the adapted layers, or their last parts.
        layers: last parts of the names of layers that the engine can adapt; None for every linear layer.

    Returns:
        The reason, which an error appends to the engine's name, such as `can't apply DoRA adapters`; None if no obstacle is known.
    """
    if dora:
        return "can't apply DoRA adapters"
    named = sorted({target.rpartition(".")[2] for target in targets})
    embeddings = [name for name in named if name in EMBEDDINGS]
    if embeddings:
        return f"can't apply adapters of embeddings ({', '.join(embeddings)})"
    roomless = [name for name in named if layers is not None and name not in layers]
    if layers is not None and roomless:
        return f"can't apply adapters of {', '.join(roomless)}; expected only layers of {', '.join(sorted(layers))}"
    return None


def without_room(version: int, who: str) -> WeightSyncError:
    """Return the error for an adapter sent to an engine that reserved no memory for adapters at its start.

    Args:
        version: the version of the update.
        who: the engine's name in messages.
    """
    return WeightSyncError(
        f"weight update {version} is an adapter, but this {who} was started without room for adapters",
        hint=f"set rollout.max_adapter_rank, {_MERGED}",
    )


def refuse_adapter(version: int, manifest: WeightManifest, *, room: int | None, who: str) -> None:
    """Raise an error if an engine with the capability `lora` can't apply an adapter.

    Args:
        version: the version of the update.
        manifest: a manifest of kind `adapter`.
        room: the largest adapter rank of the engine; None if the engine takes no adapters.
        who: the engine's name in messages.

    Raises:
        WeightSyncError: the manifest does not describe the adapter, or the adapter is of an unsupported kind or too large.
    """
    what, adapter = f"weight update {version} is", manifest.adapter
    if adapter is None:
        raise WeightSyncError(
            f"{what} an adapter, but its manifest does not describe the adapter; set the manifest's field `adapter`"
        )
    problem = unapplied(adapter.dora, adapter.target_modules, None)
    if problem is not None:
        raise WeightSyncError(
            f"{what} an adapter that can't be applied: {who} {problem}",
            hint=_MERGED.removeprefix("or "),
        )
    if room is None or adapter.rank > room:
        have = "no room for adapters" if room is None else f"room only for ranks up to {room}"
        raise WeightSyncError(
            f"{what} an adapter of rank {adapter.rank}, but {who} has {have}",
            hint=f"set rollout.max_adapter_rank={adapter.rank}, {_MERGED}",
        )
