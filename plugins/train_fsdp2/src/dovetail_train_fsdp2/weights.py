"""Weights on their way out: their Hugging Face names, a manifest, and the tensors in the dtype of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces.transport import TensorSpec, WeightManifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.adapter import Adapter


def named_weights(model: PreTrainedModel, adapter: Adapter | None = None) -> dict[str, Tensor]:
    """Every weight once, by the name that it has in a Hugging Face checkpoint. Views, not copies.

    A tied weight goes by its first name, which is the one that the checkpoint keeps. With an adapter these are the
    base's, without its update.
    """
    from transformers.core_model_loading import revert_weight_conversion

    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            base = name if adapter is None else adapter.base_name(name)
            if base is not None:
                weights[base] = tensor.detach()
    # Some architectures hold fused tensors in memory and separate ones in their checkpoints.
    converted: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return converted


def manifest_of(
    model: PreTrainedModel, version: int, dtype: torch.dtype, adapter: Adapter | None = None
) -> WeightManifest:
    """Names, shapes and dtypes of what `wire_tensors` yields, in its order."""
    return WeightManifest(
        version=version,
        tensors=tuple(
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=_wire_dtype(tensor, dtype))
            for name, tensor in named_weights(model, adapter).items()
        ),
    )


def wire_tensors(
    model: PreTrainedModel, manifest: WeightManifest, adapter: Adapter | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The manifest's tensors in its order, each merged with its adapter and cast as it is asked for.

    Raises:
        WeightSyncError: the manifest names what the model does not have.
    """
    weights = named_weights(model, adapter)
    for spec in manifest.tensors:
        tensor = weights.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            have = "nothing of that name" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise WeightSyncError(
                f"the manifest of version {manifest.version} names {spec.name!r} with shape {spec.shape}, "
                f"but the model has {have}",
                hint="make the manifest with the weight_manifest of the engine that sends",
            )
        whole = tensor if adapter is None else adapter.merged(tensor)
        yield spec.name, whole.to(getattr(torch, spec.dtype))


def _wire_dtype(tensor: Tensor, dtype: torch.dtype) -> str:
    return str(dtype if tensor.is_floating_point() else tensor.dtype).removeprefix("torch.")
