"""Weights to send or export: Hugging Face names, a manifest, and the tensors in the dtype of the transfer.

Legend: *in memory* means tensors as the model holds them, *stored* means tensors as checkpoints of the architecture hold them. A
fused tensor in memory may be several stored tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.interfaces import TensorSpec, WeightManifest
from dovetail_train_fsdp2.loading import tensors_of
from dovetail_train_fsdp2.shards import whole, wholes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.adapter import PeftAdapter
    from dovetail_train_fsdp2.forward import ModelRunner


def manifest_of(runner: ModelRunner, version: int) -> WeightManifest:
    """Return names, shapes and dtypes of the tensors that `outgoing` yields, in the same order, without gathering a tensor."""
    adapter = runner.adapter
    alone = adapter is not None and adapter.section.sync == "adapter"
    if adapter is not None and alone:
        tensors = empty(adapter.tensors(), runner.dtype)
    else:
        in_memory = empty(tensors_of(runner.trunk, adapter), runner.dtype)
        tensors = dict(stored(runner.trunk, in_memory.items(), in_memory))
    return WeightManifest(
        version=version,
        kind="adapter" if alone else "full",
        tensors=tuple(
            TensorSpec(
                name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
            )
            for name, tensor in tensors.items()
        ),
        adapter=adapter.described() if adapter is not None and alone else None,
    )


def outgoing(runner: ModelRunner, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
    """Yield the manifest's tensors in the manifest's shapes and dtypes, each gathered and cast on request.

    They are the adapter's tensors if the manifest's kind is `adapter`, else the model's, with the adapter merged if there is one.

    Collective, block by block, if the model is sharded: all ranks must iterate to the end. Every rank holds one block of tensors at
    a time, or all tensors that the architecture stores together.
    """
    adapter, dtype = runner.adapter, runner.dtype
    if manifest.kind == "adapter":
        assert adapter is not None
        yield from _cast(adapter.tensors(), runner)
        return
    tensors = tensors_of(runner.trunk, adapter)
    if adapter is None:
        gathered = _cast(tensors, runner)
    else:
        gathered = merged(runner.trunk, adapter, dtype, lambda _, t: whole(t, runner.device))
    yield from stored(runner.trunk, gathered, empty(tensors, dtype))


def _cast(tensors: Mapping[str, Tensor], runner: ModelRunner) -> Iterator[tuple[str, Tensor]]:
    return wholes(tensors.items(), runner.device, lambda tensor: _wire_dtype(tensor, runner.dtype))


def merged(
    trunk: PreTrainedModel,
    adapter: PeftAdapter | None,
    dtype: torch.dtype,
    read: Callable[[str, Tensor], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor's name in memory and the tensor, in its unsharded shape, merged with the adapter in float32 and then cast.

    Args:
        trunk: the model, or its base.
        adapter: the model's adapter; None if it has none.
        dtype: the dtype of floating-point results.
        read: a function that returns a whole base tensor, given its name and the tensor in memory; called sequentially.
    """
    for name, tensor in tensors_of(trunk, adapter).items():
        found = read(name, tensor)
        full = found if adapter is None else adapter.merged(name, found)
        yield name, full.to(_wire_dtype(tensor, dtype))


def stored(
    model: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    empty: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Convert whole tensors in memory, of any shape, to the names and shapes of the architecture's checkpoints.

    Tensors are converted one at a time if no stored tensor depends on several tensors in memory; otherwise all are held at once.

    Args:
        model: the model, with transformers' record of the stored form of its weights.
        tensors: the tensors in the order of `empty`.
        empty: the tensors by name on the meta device.
    """
    from transformers.core_model_loading import revert_weight_conversion

    given = dict(empty)
    at_once = revert_weight_conversion(model, given)
    if at_once is given:
        yield from tensors
        return
    one_by_one = [
        name
        for key, tensor in empty.items()
        for name in revert_weight_conversion(model, {key: tensor})
    ]
    if sorted(one_by_one) == sorted(at_once):
        for key, tensor in tensors:
            yield from revert_weight_conversion(model, {key: tensor}).items()
        return
    yield from revert_weight_conversion(model, dict(tensors)).items()


def empty(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors of the same names and shapes on the meta device; floating-point tensors get the dtype `dtype`."""
    return {
        name: torch.empty(tuple(tensor.shape), dtype=_wire_dtype(tensor, dtype), device="meta")
        for name, tensor in tensors.items()
    }


def _wire_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
