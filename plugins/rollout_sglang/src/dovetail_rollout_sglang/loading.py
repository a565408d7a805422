"""Loading weights into a model inside SGLang, and finding parameters that were not loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import WeightSyncError
from dovetail_rollout_sglang.versions import quantised, refitted
from dovetail_serving import refuse_missing_weights, without_adapters

Named = tuple[str, Tensor]


@torch.no_grad()
def load(
    model: nn.Module,
    tensors: Iterable[Named],
    *,
    lasting: bool,
    device: torch.device,
    touched: Callable[[], None],
) -> None:
    """Load a complete set of weights into an SGLang model.

    After a failure the model may hold a mixture of old and new weights; it can be loaded again.

    Args:
        model: the SGLang model.
        tensors: the verified tensors by their Hugging Face names, read to the end.
        lasting: whether each tensor stays valid after the next is requested. If not, tensors are copied, since models may hold a
            tensor until other tensors of its layer arrive.
        device: the model's device.
        touched: a function to call before each tensor is passed to the model.

    Raises:
        WeightSyncError: a parameter of the model was not loaded, or only in part.
    """

    def handed_on() -> Iterator[Named]:
        for name, tensor in tensors:
            touched()
            yield name, tensor if lasting else tensor.to(device, copy=True)

    incoming = handed_on()
    with without_adapters(model):
        packed = quantised(model)
        with refitted(model, device), noted(model) as loaded:
            model.load_weights(incoming)  # type: ignore[operator]
            for name, _ in incoming:
                raise WeightSyncError(f"SGLang did not load the tensor {name!r}")
        if not packed:
            _refuse_missing(model, loaded)


@contextmanager
def noted(model: nn.Module) -> Iterator[dict[str, set[Any]]]:
    """Record in the block which parameters are loaded, in the yielded mapping from a parameter's name to its loaded shards.

    A shard is `q`, `k`, `v` or the index of a part of a fused layer; None stands for the whole parameter.

    SGLang's models load each parameter through its `weight_loader`, and do not report which parameters were loaded.
    """
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    loaded: dict[str, set[Any]] = {}
    undo: list[Callable[[], None]] = []
    for name, parameter in model.named_parameters():
        held = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
        before = getattr(parameter, held, None)
        setattr(parameter, held, _noting(before or default_weight_loader, loaded, name))
        undo.append(_undoing(parameter, held, before))
    try:
        yield loaded
    finally:
        for put_back in undo:
            put_back()


def _noting(loader: Callable[..., Any], loaded: dict[str, set[Any]], name: str) -> Any:
    def noting(parameter: object, tensor: Tensor, *rest: object, **named: object) -> Any:
        shards = [one for one in (*rest, *named.values()) if _is_shard(one)]
        loaded.setdefault(name, set()).add(shards[0] if len(shards) == 1 else None)
        return loader(parameter, tensor, *rest, **named)

    return noting


def _is_shard(value: object) -> bool:
    return value in ("q", "k", "v") if isinstance(value, str) else type(value) is int


def _undoing(parameter: nn.Parameter, held: str, before: object) -> Callable[[], None]:
    if before is None:
        return lambda: delattr(parameter, held)
    return lambda: setattr(parameter, held, before)


def _refuse_missing(model: nn.Module, loaded: dict[str, set[Any]]) -> None:
    missing = []
    for name, _ in model.named_parameters():
        shards = loaded.get(name)
        if shards is None:
            missing.append(name)
            continue
        lacking = _all_shards(model, name, shards) - shards
        if lacking:
            parts = ", ".join(map(str, sorted(lacking, key=str)))
            missing.append(f"{name} (its part {parts})")
    refuse_missing_weights(missing)


def _all_shards(model: nn.Module, name: str, seen: set[Any]) -> set[Any]:
    """Return the shards that a parameter must have if the shards `seen` were loaded; empty if it was loaded whole, or not at all."""
    if None in seen or not seen:
        return set()
    if seen <= {"q", "k", "v"}:
        return {"q", "k", "v"}
    sizes = getattr(model.get_submodule(name.rpartition(".")[0]), "output_sizes", None)
    return set(range(len(sizes))) if sizes is not None else set()
