"""New weights for the model: all tensors are received and checked before any is copied into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError, nearest
from dovetail.interfaces import WeightManifest


def refuse_misfits(model: object, manifest: WeightManifest) -> None:
    """Raise an error for a weight update that does not fit the model, before the transfer starts.

    Raises:
        WeightSyncError: the kind of update is not supported, or names or shapes differ from the model's parameters.
    """
    who = f"weight update {manifest.version}"
    if manifest.kind != "full":
        raise WeightSyncError(
            f"{who} is of kind {manifest.kind!r}; this rollout loads only updates of the kind 'full'",
            hint="let the training engine send merged weights (fsdp2: actor.engine.lora.sync=merged)",
        )
    parameters = _parameters(model, [spec.name for spec in manifest.tensors])
    for spec in manifest.tensors:
        parameter = parameters.get(spec.name)
        if parameter is None:
            raise WeightSyncError(
                f"{who} has the tensor {spec.name!r}, which {type(model).__name__} lacks"
                f"; the nearest name is {nearest(spec.name, parameters)!r}"
            )
        if tuple(parameter.shape) != tuple(spec.shape):
            raise WeightSyncError(
                f"{who} has {spec.name!r} with shape {tuple(spec.shape)}; "
                f"the model has {tuple(parameter.shape)}"
            )
    # Tied parameters are one tensor: one of their names is enough.
    sent = {id(parameters[spec.name]) for spec in manifest.tensors}
    missing = {id(p): name for name, p in reversed(parameters.items()) if id(p) not in sent}
    if missing:
        raise WeightSyncError(
            f"{who} lacks {len(missing)} of the model's parameters, such as {next(reversed(missing.values()))!r}"
        )


def copy_weights(model: object, staged: list[tuple[str, Tensor]]) -> None:
    """Copy staged tensors into the model's parameters of the same names and shapes, in the model's dtype."""
    parameters = _parameters(model, [name for name, _ in staged])
    with torch.no_grad():
        for name, tensor in staged:
            parameters[name].copy_(tensor)


def _parameters(model: Any, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Return the model's parameters by name. If a wanted name is not among them, add the names under which checkpoints store them."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if all(name in named for name in wanted):
        return named
    return {**_stored(model, named), **named}


def _stored(model: object, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters by their names in checkpoints, without parameters that checkpoints store in several tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = {}
    for name, parameter in named.items():
        empty = torch.empty_like(parameter, device="meta")
        stored = revert_weight_conversion(model, {name: empty})
        if len(stored) == 1:
            found[next(iter(stored))] = parameter
    return found
