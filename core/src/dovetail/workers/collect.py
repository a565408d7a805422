"""How the results of an nd call's parts become one result, in the caller's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.batch.batch import Batch
from dovetail.errors import DispatchError
from dovetail.metrics import merge_metrics
from dovetail.workers.division import PADDING, Division


def collect(results_K: Sequence[Any], division: Division) -> Any:
    """Return one result from the K parts' own; those of padding alone are dropped.

    Batches are joined in the caller's order, mappings of metrics merged, tuples collected element by element;
    None stays None, and anything else comes as a list, one element a part.

    Raises:
        DispatchError: the parts returned different kinds of results, or batches of another length than theirs.
    """
    filled = [k for k, part in enumerate(division.parts_K) if len(part)]
    return _collect([results_K[k] for k in filled], [division.parts_K[k] for k in filled], division)


def _collect(results: list[Any], parts: list[np.ndarray], division: Division) -> Any:
    kinds = {_kind(result) for result in results}
    if len(kinds) > 1:
        found = ", ".join(f"part {k}: {_kind(result)}" for k, result in enumerate(results))
        raise DispatchError(f"the ranks returned different kinds of results: {found}")
    match kinds.pop():
        case "None":
            return None
        case "Batch":
            return _join(results, parts, division)
        case "metrics":
            return merge_metrics(results)
        case "tuple":
            columns = zip(*results, strict=True)
            return tuple(_collect(list(column), parts, division) for column in columns)
    return results


def _kind(result: object) -> str:
    if result is None:
        return "None"
    if isinstance(result, Batch):
        return "Batch"
    if isinstance(result, Mapping) and all(hasattr(value, "merge") for value in result.values()):
        return "metrics"
    return "tuple" if type(result) is tuple else type(result).__name__


def _join(results: list[Batch], parts: list[np.ndarray], division: Division) -> Batch:
    for k, (result, part) in enumerate(zip(results, parts, strict=True)):
        if len(result) != len(part):
            raise DispatchError(
                f"part {k} was given {len(part)} samples, but returned {len(result)}",
                hint="a method dispatched by nd returns one sample for each that it is given, in order",
            )
    joined = Batch.concat(results)
    if division.spare is not None:
        joined = joined.drop([PADDING])
    return joined.take(np.argsort(np.concatenate(parts)))
