"""Metrics whose values are still tensors: made on the accelerator, fetched together once an update.

Reading a value makes the host wait for the accelerator. A loss reports tensors in its metrics instead, and
`resolve_metrics` turns all tensors of an update into numbers with one transfer. T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from dovetail.metrics import Max, Mean, Metric, merge_metrics


def mean_metric(values_T: Tensor, mask_T: Tensor, count: Tensor | None = None) -> Mean:
    """Return the mean of the values that the mask selects, not yet fetched from the accelerator.

    Args:
        values_T: float or bool [T].
        mask_T: bool [T].
        count: number of selected tokens, if the caller already has it.
    """
    if values_T.dtype == torch.bool:
        total = (values_T & mask_T).count_nonzero()
    else:
        total = values_T.detach().where(mask_T, 0).sum()
    weight = mask_T.count_nonzero() if count is None else count
    return Mean(cast("float", total), cast("float", weight))


def share_metric(chosen_T: Tensor, count: Tensor) -> Mean:
    """Return the share of tokens that are chosen, not yet fetched from the accelerator.

    Args:
        chosen_T: bool [T], or numbers that are 0 on tokens not chosen; False or 0 on masked tokens.
        count: int [], number of tokens with mask 1.
    """
    return Mean(cast("float", chosen_T.count_nonzero()), cast("float", count))


def max_metric(values_T: Tensor, mask_T: Tensor) -> Max:
    """Return the largest value that the mask selects, not yet fetched from the accelerator; −∞ if the mask selects none."""
    chosen_T = values_T.detach().where(mask_T, -torch.inf)
    largest = chosen_T.amax() if chosen_T.numel() else chosen_T.new_full((), -torch.inf)
    return Max(cast("float", largest))


def resolve_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Fetch all tensors in the metrics of several parts, such as micro-batches, with one transfer, and merge the metrics by name."""
    tensors = [
        value
        for part in parts
        for metric in part.values()
        for value in _figures(metric).values()
        if isinstance(value, Tensor)
    ]
    if not tensors:
        return merge_metrics(parts)
    fetched = torch.stack([tensor.detach().to(torch.float64) for tensor in tensors]).tolist()
    numbers = iter(fetched)
    return merge_metrics(
        {name: _with_numbers(metric, numbers) for name, metric in part.items()} for part in parts
    )


def _figures(metric: object) -> dict[str, Any]:
    cls: Any = type(metric)
    if not attrs.has(cls):
        return {}
    return {field.name: getattr(metric, field.name) for field in attrs.fields(cls)}


def _with_numbers(metric: Any, numbers: Iterator[float]) -> Any:
    changes = {
        name: next(numbers) for name, value in _figures(metric).items() if isinstance(value, Tensor)
    }
    return attrs.evolve(metric, **changes) if changes else metric
