"""Whether an adapter that is to come can be applied: known before it is sent."""

from __future__ import annotations

from dovetail.errors import WeightSyncError
from dovetail.interfaces.transport import WeightManifest

_MERGED = "or send merged weights (actor.engine.lora.sync: merged)"


def refuse_adapter(version: int, manifest: WeightManifest, *, room: int | None, who: str) -> None:
    """Refuse an adapter that an engine with the capability `lora` can't apply.

    Args:
        version: of the update.
        manifest: of kind `adapter`.
        room: the largest rank for which the engine was started; None where for none.
        who: what the engine is called in messages.

    Raises:
        WeightSyncError: it is not described, is of a kind that is not applied, or finds no room.
    """
    what, adapter = f"weight update {version} is", manifest.adapter
    if adapter is None:
        raise WeightSyncError(f"{what} an adapter, and its manifest does not describe it")
    if adapter.dora:
        raise WeightSyncError(
            f"{what} a DoRA adapter, which {who} does not apply",
            hint=_MERGED.removeprefix("or "),
        )
    if room is None or adapter.rank > room:
        have = "no room for one" if room is None else f"room for rank {room}"
        raise WeightSyncError(
            f"{what} an adapter of rank {adapter.rank}, and {who} has {have}",
            hint=f"set rollout.max_adapter_rank={adapter.rank}, {_MERGED}",
        )
