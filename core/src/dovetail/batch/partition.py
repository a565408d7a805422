"""Balanced partitions: samples to ranks or micro-batches, by token count, with units kept whole.

Legend: N samples, U units (what must stay together: a sample, a pair, a group), K parts.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.errors import ColumnError

DIFFERENCED = 1024
"""Number of units that `balanced_partition` divides by the largest differencing method, or 2 K if that is more. Units beyond this number,
the heaviest ones, are assigned before: one after another, each to the part that is lightest so far."""


def token_counts(batch: Batch) -> np.ndarray:
    """Return the number of tokens that each sample costs, int64 [N].

    Counts the tokens in the columns `prompt_ids` and `response_ids`. If the batch has neither, the count is the length of the
    sample's longest ragged row, or 1 without ragged columns.
    """
    tokens_N = np.zeros(len(batch), np.int64)
    known = [name for name in ("prompt_ids", "response_ids") if name in batch]
    for name in known:
        tokens_N += batch[name].lengths
    if known:
        return tokens_N
    ragged = [values for values in batch.columns.values() if isinstance(values, Ragged)]
    for values in ragged:
        np.maximum(tokens_N, values.lengths, out=tokens_N)
    return tokens_N if ragged else tokens_N + 1


def balanced_partition(
    weights_N: np.ndarray, parts: int, units_N: np.ndarray | None = None
) -> list[np.ndarray]:
    """Divide samples into parts of nearly equal weight, deterministically.

    A unit (samples that stay together) is never divided. Uses the largest differencing method (Karmarkar and Karp, 1982). If there
    are more than 1,024 units (or 2 K, if that is more), the heaviest units in excess are first given to the lightest part, one by one.
    The heaviest and the lightest part differ by at most the heaviest unit. A part is empty only if there are fewer units than parts.

    Args:
        weights_N: weights of the samples [N], ≥ 0, such as token counts.
        parts: the number of parts K, ≥ 1.
        units_N: unit ids of the samples [N]; by default every sample is a unit.

    Returns:
        K arrays of sample indices, int64 and rising, in the order of their first samples; empty arrays last.

    Raises:
        ColumnError: a weight is negative or not finite, the lengths differ, or `parts` is below 1.
    """
    weights_U, index_N = _units(weights_N, units_N)
    if parts < 1:
        raise ColumnError(f"a batch can't be divided into {parts} parts; expected 1 or more")
    if parts == 1:
        return [np.arange(len(index_N), dtype=np.int64)]
    return _samples_of(_difference(_distinct(weights_U), parts), index_N, parts)


def _units(weights_N: object, units_N: object) -> tuple[np.ndarray, np.ndarray]:
    """Return each unit's weight, float64 [U], and each sample's unit, int64 [N]; units are numbered by first appearance."""
    weights_N = np.asarray(weights_N, np.float64)
    if weights_N.ndim != 1 or not np.all(np.isfinite(weights_N)) or np.any(weights_N < 0):
        raise ColumnError(
            f"weights must be an array [N] of finite numbers ≥ 0, but are {weights_N!r}"
        )
    if units_N is None:
        return weights_N, np.arange(len(weights_N))
    units_N = np.asarray(units_N)
    if units_N.shape != weights_N.shape:
        raise ColumnError(
            f"the unit ids have shape {units_N.shape}; expected {weights_N.shape}, that of the weights"
        )
    _, first, inverse = np.unique(units_N, return_index=True, return_inverse=True)
    index_N = np.argsort(np.argsort(first))[inverse]
    return np.bincount(index_N, weights=weights_N, minlength=len(first)), index_N


def _distinct(weights_U: np.ndarray) -> list[float]:
    """Return the weights of the units as floats, each raised by the same small amount, so that parts of equal weight get similar
    numbers of units, also if weights are 0.
    """
    positive = weights_U[weights_U > 0]
    smallest = min(1.0, positive.min()) if len(positive) else 1.0
    return (weights_U + smallest / (len(weights_U) + 1)).tolist()


def _difference(weights_U: list[float], parts: int) -> list[list[int]]:
    """Partition by largest differencing, and return the unit indices of each part that is not empty.

    A partial solution is a list of (weight, unit indices), one pair for each part that has units, heaviest first. At first each unit is a
    partial solution. The two with the largest spreads are merged until one is left. If there are very many units
    (see `DIFFERENCED`), the heaviest are first given to the lightest parts, one by one, which makes one more partial solution.
    """
    order = sorted(range(len(weights_U)), key=lambda unit: -weights_U[unit])
    many = max(0, len(order) - max(DIFFERENCED, 2 * parts))
    ticket = count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    if many:
        dealt = _dealt(weights_U, order[:many], parts)
        heap.append((_spread(dealt, parts), next(ticket), dealt))
    for unit in order[many:]:
        slots = [(weights_U[unit], [unit])]
        heap.append((_spread(slots, parts), next(ticket), slots))
    heapq.heapify(heap)
    while len(heap) > 1:
        slots = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2], parts)
        heapq.heappush(heap, (_spread(slots, parts), next(ticket), slots))
    return [units for _, units in heap[0][2]] if heap else []


def _dealt(weights_U: list[float], order: list[int], parts: int) -> list[tuple[float, list[int]]]:
    """Give each unit, in this order, to the lightest part so far; return the filled parts, heaviest first."""
    lightest = [(0.0, number) for number in range(parts)]
    units_K: list[list[int]] = [[] for _ in range(parts)]
    for unit in order:
        weight, number = lightest[0]
        units_K[number].append(unit)
        heapq.heapreplace(lightest, (weight + weights_U[unit], number))
    filled = [(weight, units_K[number]) for weight, number in lightest if units_K[number]]
    return sorted(filled, key=lambda slot: -slot[0])


def _spread(slots: list[tuple[float, list[int]]], parts: int) -> float:
    """Return the lightest part's weight minus the heaviest's, so that a min-heap gives the solution with the largest spread first."""
    return (slots[-1][0] if len(slots) == parts else 0.0) - slots[0][0]


def _merge(
    one: list[tuple[float, list[int]]], other: list[tuple[float, list[int]]], parts: int
) -> list[tuple[float, list[int]]]:
    """Merge two partial solutions: the heaviest parts of each join the lightest of the other; empty parts count as lightest."""
    shared = max(0, len(one) + len(other) - parts)
    alone = len(one) - shared
    met = zip(one[alone:], reversed(other[len(other) - shared :]), strict=True)
    slots = one[:alone] + other[: len(other) - shared]
    slots += [(a + b, units + more) for (a, units), (b, more) in met]
    return sorted(slots, key=lambda slot: -slot[0])


def _samples_of(divided: list[list[int]], index_N: np.ndarray, parts: int) -> list[np.ndarray]:
    part_of_U = np.zeros(int(index_N.max()) + 1 if len(index_N) else 0, np.int64)
    for number, units in enumerate(divided):
        part_of_U[units] = number
    part_N = part_of_U[index_N]
    samples = [np.flatnonzero(part_N == number) for number in range(len(divided))]
    samples.sort(key=lambda part: int(part[0]))
    return samples + [np.empty(0, np.int64)] * (parts - len(samples))
