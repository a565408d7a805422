"""Loading weights into a sharded model: each rank reads its own rows from safetensors, so that no rank holds the whole model.

Some architectures have other tensor names in memory than in the checkpoint, and .bin files can't be read by rows. Rank 0 then loads the
model with transformers and sends every tensor to the other ranks. This is slower, and the model must fit into the host memory of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.errors import ModelError
from dovetail.sections import ModelSection
from dovetail_torch_engines import Ranks, StoredCheckpoint
from dovetail_train_fsdp2.model import load_model, load_trunk
from dovetail_train_fsdp2.shards import fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.adapter import PeftAdapter


def tensors_of(model: PreTrainedModel, adapter: PeftAdapter | None = None) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model, each once, by name in memory.

    Tensors have any shape […]; sharded ones are DTensors. A tied weight is returned under the first of its names only. With an adapter only the base's tensors are
    returned, by their names without the adapter.
    """
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        base = name if adapter is None else adapter.base_name(name)
        if base is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[base] = tensor
    return tensors


def stored_places(
    model: PreTrainedModel, trunk: PreTrainedModel, checkpoint: StoredCheckpoint
) -> dict[str, str] | None:
    """Return the trunk's tensor names in a checkpoint, if the checkpoint stores every tensor as it is in memory.

    Args:
        model: the language model, without an adapter.
        trunk: the part to load: the same model, or its base without the head.
        checkpoint: the checkpoint to search.

    Returns:
        Names in the checkpoint by the names of `tensors_of`; None if a tensor is missing, has another shape or form, or can't be
        read by rows.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not checkpoint.sliceable or get_model_conversion_mapping(model, add_legacy=False):
        return None
    names: dict[int, list[str]] = {}
    for name, tensor in trunk.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    prefix = f"{model.base_model_prefix}."
    places: dict[str, str] = {}
    for name, tensor in tensors_of(trunk).items():
        spellings = [
            spelling
            for own in names[id(tensor)]
            for spelling in (own, f"{prefix}{own}", own.removeprefix(prefix))
        ]
        place = next((spelling for spelling in spellings if spelling in checkpoint.names), None)
        if place is None or checkpoint.shape(place) != tuple(tensor.shape):
            return None
        places[name] = place
    return places


def read_shards(
    tensors: Mapping[str, Tensor], places: Mapping[str, str], section: ModelSection
) -> None:
    """Fill this rank's shards from the checkpoint's files, which hold the tensors in their unsharded shapes.

    Args:
        tensors: the tensors to fill, by name in memory.
        places: the tensors' names in the checkpoint, by name in memory, as `stored_places` returns them.
        section: the config section with the checkpoint's path.

    Raises:
        ModelError: a file can't be read.
    """
    from safetensors import SafetensorError

    with StoredCheckpoint(section) as checkpoint:
        try:
            for name, tensor in tensors.items():
                place = places[name]
                fill(
                    tensor,
                    lambda first, last, place=place: checkpoint.rows(place, first, last),  # type: ignore[misc]
                )
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model {section.path!r} can't be read: {error}") from error


def give_out(
    trunk: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    section: ModelSection,
    ranks: Ranks,
    device: torch.device,
    *,
    base_only: bool,
) -> None:
    """Load the model on rank 0, and send every rank its shards; collective.

    Args:
        trunk: the sharded module. Transformers' record of how the files' tensors were converted is copied to it from rank 0.
        tensors: the tensors […] of which to fill this rank's shards, as `tensors_of` returns them.
        section: the config section with the checkpoint's path.
        ranks: all ranks.
        device: the device for transfers.
        base_only: whether the trunk is the model without its head.

    Raises:
        ModelError: the model can't be loaded, or differs from its config. Raised on every rank.
    """
    loaded: dict[str, Tensor] = {}
    forms: list[Any] = [None]
    with ranks.together():
        if ranks.first:
            cpu = torch.device("cpu")
            model = load_trunk(section, cpu) if base_only else load_model(section, cpu)
            forms = [getattr(model, "_weight_conversions", None)]
            loaded = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
            _check_same(section, tensors, loaded)
    if ranks.size > 1:
        dist.broadcast_object_list(forms, src=0)
    # With the same conversions, every rank sends and exports tensors under the checkpoint's names.
    trunk._weight_conversions = forms[0]  # noqa: SLF001 - transformers' own
    for name, tensor in tensors.items():
        whole = loaded.pop(name).to(device) if ranks.first else None
        if whole is None:
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            whole = torch.empty(tensor.shape, dtype=dtype, device=device)
        if ranks.size > 1:
            dist.broadcast(whole.contiguous(), src=0)
        fill(tensor, lambda first, last, whole=whole: whole[first:last] if whole.dim() else whole)  # type: ignore[misc]


def _check_same(
    section: ModelSection, expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor]
) -> None:
    want, have = ({n: tuple(t.shape) for n, t in ts.items()} for ts in (expected, loaded))
    if wrong := sorted(dict(want.items() ^ have.items())):
        raise ModelError(
            f"model {section.path!r} can't be sharded: its tensor {wrong[0]!r} has shape "
            f"{have.get(wrong[0], 'none (no such tensor)')}; expected {want.get(wrong[0], 'none (no such tensor)')} by its config",
            hint="if the model is quantised, save it in full precision: quantised models can't be trained",
        )
