"""What travels as JSON to vLLM's processes: which transport to make, what an update carries, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs

from dovetail.interfaces import load_plugin_class, make_plugin
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.transport import (
    AdapterSpec,
    TensorSpec,
    WeightManifest,
    WeightReceiver,
    WeightTransport,
)


def transport_info(transport: WeightTransport, context: PluginContext) -> dict[str, Any]:
    """What makes the same transport in another process: JSON values.

    Returns:
        `{"transport": {name, path, attribute, config}, "context": {seed, role, rank, run_directory}}`.
    """
    config = attrs.asdict(transport.config)
    place = context.run_directory
    return {
        "transport": {
            "name": transport.name,
            "path": config.get("path"),
            "attribute": config.get("attribute"),
            "config": config,
        },
        "context": {
            "seed": context.seed,
            "role": context.role or "rollout",
            "rank": context.rank,
            "run_directory": None if place is None else str(Path(place).resolve()),
        },
    }


def receiver_from(
    transport: Mapping[str, Any], context: Mapping[str, Any], device: str
) -> WeightReceiver:
    """Make a transport from what `transport_info` said, and its receiver.

    Args:
        transport: of `transport_info`.
        context: of `transport_info`.
        device: the torch device on which the weights are wanted.

    Raises:
        PluginError: this environment has no such transport.
    """
    ref = PluginRef(
        kind="weight_transport",
        name=transport["name"],
        path=transport["path"],
        attribute=transport["attribute"],
    )
    config = cattrs.structure(dict(transport["config"]), load_plugin_class(ref).Config)
    place = context["run_directory"]
    made: Any = make_plugin(
        attrs.evolve(ref, config=config),
        PluginContext(
            seed=context["seed"],
            role=context["role"],
            rank=context["rank"],
            run_directory=None if place is None else Path(place),
            device=device,
        ),
    )
    receiver: WeightReceiver = made.receiver()
    return receiver


def manifest_info(manifest: WeightManifest) -> dict[str, Any]:
    """A manifest as JSON values; `manifest_from` reads it."""
    return attrs.asdict(manifest)


def manifest_from(info: Mapping[str, Any]) -> WeightManifest:
    """The manifest that `manifest_info` wrote."""
    adapter = info["adapter"]
    if adapter is not None:
        adapter = AdapterSpec(
            **{**adapter, "target_modules": tuple(adapter["target_modules"])},
        )
    tensors = tuple(
        TensorSpec(name=t["name"], shape=tuple(t["shape"]), dtype=t["dtype"])
        for t in info["tensors"]
    )
    return WeightManifest(**{**info, "adapter": adapter, "tensors": tensors})


@attrs.frozen(kw_only=True)
class Outcome:
    """What an update came to in one of vLLM's processes."""

    error: str | None = None
    """Why it did not arrive whole; None where it did."""
    hint: str | None = None
    changed: bool = False
    """Whether anything of the model was overwritten."""
    adapter: int | None = None
    """vLLM's number of the adapter that it carried."""
