"""The dispatch modes that core ships: one_to_all, all_to_all, rank_zero, and nd over the axes of a mesh.

Legend: N samples, K parts of a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.partition import balanced_partition, token_counts
from dovetail.batch.ragged import Ragged
from dovetail.config.builtin import NdConfig
from dovetail.dispatch.mesh import Mesh
from dovetail.dispatch.registration import UNIT_COLUMNS, ModeSpec
from dovetail.errors import DispatchError
from dovetail.interfaces.dispatch_mode import Call, DispatchMode
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.plugin import PluginContext
from dovetail.metrics import merge_metrics

PADDING = "padding"
"""Column that is True on padding samples; present only if a part of the batch consists of padding."""


class OneToAll(DispatchMode):
    """Calls every rank with the same arguments; returns the results in rank order, or None if all are None."""

    name = "one_to_all"
    api = ">=1.0,<2"

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Any]:
        return [(args, kwargs)] * mesh.size, None

    def collect(self, mesh: Mesh, results: Sequence[Any], receipt: Any) -> Any:
        return None if all(result is None for result in results) else list(results)


class AllToAll(OneToAll):
    """Calls rank i with element i of every argument, which must be a list of one element per rank; returns results as one_to_all does."""

    name = "all_to_all"

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Any]:
        for name, value in [*enumerate(args), *kwargs.items()]:
            if not isinstance(value, list | tuple) or len(value) != mesh.size:
                found = len(value) if isinstance(value, list | tuple) else type(value).__name__
                raise DispatchError(
                    f"argument {name!r} must be a list with one element for each of the "
                    f"{mesh.size} ranks, not {found}",
                    hint="all_to_all hands element i of every argument to rank i",
                )
        return [
            (tuple(value[rank] for value in args), {k: v[rank] for k, v in kwargs.items()})
            for rank in range(mesh.size)
        ], None


class RankZero(DispatchMode):
    """Calls only rank 0, and returns its result."""

    name = "rank_zero"
    api = ">=1.0,<2"

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Any]:
        return [(args, kwargs), *[None] * (mesh.size - 1)], None

    def collect(self, mesh: Mesh, results: Sequence[Any], receipt: Any) -> Any:
        return results[0]


class Nd(DispatchMode):
    """Divides batches into parts, one for each coordinate on the split axes, and replicates the parts over the other axes.

    All Batch arguments are divided alike, by the token counts of the first. A unit (a sample, pair or group) is never divided; an
    ObjectiveSpec among the arguments sets the unit. If it is a sample, groups stay whole where no part then has over 2% more tokens.
    Other arguments go to every rank. The result of a part is that of the rank with
    coordinate 0 on the replicating axes, in the last pipeline stage. Of the results, batches are joined in the caller's order, mappings
    of metrics are merged, and tuples are collected element by element. None stays None. Other results become a list, one element a part.

    With fewer units than parts, a part without samples gets a masked copy of the lightest unit, marked True in the column `padding`: its
    ranks must take part in collectives. Their results are dropped.
    """

    name = "nd"
    api = ">=1.0,<2"
    Config = NdConfig

    def split(
        self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Call | None], Division]:
        if mesh.name != self.config.mesh:
            raise DispatchError(
                f"the method is dispatched over the mesh {self.config.mesh!r}, but its group has {mesh}",
                hint=f"make the group with Mesh(…, name={self.config.mesh!r})",
            )
        batches = _batches(args, kwargs)
        part_of_rank, rank_of_part = _parts_of(mesh, self.config.split)
        parts = len(rank_of_part)
        specs = (value for value in (*args, *kwargs.values()) if isinstance(value, ObjectiveSpec))
        unit = next((spec.unit for spec in specs), self.config.unit)
        division = divide(batches[0], parts, unit)

        def shares(value: object) -> list[Any]:
            return division.shares(value) if isinstance(value, Batch) else [value] * parts

        args_K = [shares(value) for value in args]
        kwargs_K = {name: shares(value) for name, value in kwargs.items()}
        return [
            (tuple(arg[k] for arg in args_K), {name: arg[k] for name, arg in kwargs_K.items()})
            for k in part_of_rank
        ], division

    def answering(self, mesh: Mesh) -> frozenset[int]:
        return frozenset(_parts_of(mesh, self.config.split)[1])

    def collect(self, mesh: Mesh, results: Sequence[Any], receipt: Division) -> Any:
        """Collect the ranks' results; see `DispatchMode.collect`.

        Raises:
            DispatchError: the parts returned different kinds of results, or a batch of another length than the part.
        """
        _, rank_of_part = _parts_of(mesh, self.config.split)
        filled = [k for k, part in enumerate(receipt.parts_K) if len(part)]
        return _collected([results[rank_of_part[k]] for k in filled], receipt)


@lru_cache(maxsize=256)
def _parts_of(mesh: Mesh, split: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return for each rank the index of its part, where the last split axis varies fastest, and for each part the rank with its result."""
    part_of_rank, rank_of_part = [], {}
    for rank in range(mesh.size):
        where, part = mesh.coordinates(rank), 0
        for axis in split:
            part = part * mesh.axis_size(axis) + where[axis]
        part_of_rank.append(part)
        replicated = where.keys() - set(split)
        if all(
            where[axis] == (mesh.axis_size(axis) - 1 if axis == "pp" else 0) for axis in replicated
        ):
            rank_of_part[part] = rank
    return tuple(part_of_rank), tuple(rank_of_part[part] for part in range(len(rank_of_part)))


def _batches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Batch]:
    named = [*enumerate(args), *kwargs.items()]
    batches = [(name, value) for name, value in named if isinstance(value, Batch)]
    if not batches:
        raise DispatchError(
            "the dispatch mode nd needs a Batch among the method's arguments, but got "
            + (", ".join(type(value).__name__ for _, value in named) or "none"),
            hint="register a method without batches with Dispatch.ONE_TO_ALL",
        )
    first, count = batches[0][0], len(batches[0][1])
    for name, batch in batches[1:]:
        if len(batch) != count:
            raise DispatchError(
                f"batches of one call must have the same samples: argument {first!r} has {count}, "
                f"argument {name!r} has {len(batch)}"
            )
    return [batch for _, batch in batches]


@attrs.frozen(kw_only=True, eq=False)
class Division:
    """Assignment of the samples of a batch to parts.

    Attributes:
        parts_K: int64 sample indices of each part; a part is empty if there are fewer units than parts.
        spare: int64 sample indices of the lightest unit, whose masked copy fills empty parts; None if no part is empty.
    """

    parts_K: list[np.ndarray]
    spare: np.ndarray | None

    def shares(self, batch: Batch) -> list[Batch]:
        """Return the samples of each part as K batches; a part without samples gets the masked copy."""
        if len(self.parts_K) == 1:
            return [batch]
        if self.spare is None:
            return [batch.take(part) for part in self.parts_K]
        none = {PADDING: np.zeros(len(batch), np.bool_)}
        marked = batch if PADDING in batch else batch.with_columns(none)
        padding = masked_copy(marked.take(self.spare))
        return [marked.take(part) if len(part) else padding for part in self.parts_K]


def divide(batch: Batch, parts: int, unit: str) -> Division:
    """Divide a batch by token count, deterministically, without splitting a unit (a sample, pair or group).

    If the unit is a sample, groups are still kept whole, so that a rank computes a group's prompt once. They are divided only if the
    heaviest part would otherwise have over 2% more tokens.

    Raises:
        DispatchError: there is no sample, or the batch does not consist of whole units.
    """
    if not len(batch):
        raise DispatchError(
            "a batch without samples can't be dispatched",
            hint="skip the call when every sample was filtered out or failed",
        )
    units_N, tokens_N = unit_ids(batch, unit), token_counts(batch)
    tokens = tokens_N.tobytes()
    heaviest, parts_K = _parts(tokens, units_N.tobytes(), parts)
    if unit == "sample" and UNIT_COLUMNS["group"] in batch:
        of_groups, groups_K = _parts(tokens, unit_ids(batch, "group").tobytes(), parts)
        parts_K = groups_K if of_groups <= 1.02 * heaviest else parts_K
    spare = None if all(map(len, parts_K)) else _lightest(units_N, tokens_N)
    return Division(parts_K=list(parts_K), spare=spare)


@lru_cache(maxsize=16)
def _parts(tokens: bytes, units: bytes, parts: int) -> tuple[int, tuple[np.ndarray, ...]]:
    """Divide samples into parts of similar token counts; return the tokens of the heaviest part, and the sample indices of each part.

    `tokens` and `units` are the bytes of int64 [N] arrays, the token count and unit id of each sample, since the cache needs hashable keys.

    The partition is cached because every pass of a step divides the same batch, and read-only because callers share it.
    """
    tokens_N = np.frombuffer(tokens, np.int64)
    divided = balanced_partition(tokens_N, parts, np.frombuffer(units, np.int64))
    for rows in divided:
        rows.flags.writeable = False
    return max(int(tokens_N[rows].sum()) for rows in divided), tuple(divided)


def unit_ids(batch: Batch, unit: str) -> np.ndarray:
    """Return the id of each sample's unit, int64 [N]; samples with the same id must stay together.

    Raises:
        DispatchError: the batch lacks the unit's column, or has an odd number of samples for pairs.
    """
    if unit == "pair" and UNIT_COLUMNS[unit] not in batch:
        if len(batch) % 2:
            raise DispatchError(f"unit 'pair' needs an even number of samples, not {len(batch)}")
        return np.arange(len(batch)) // 2
    if unit in UNIT_COLUMNS:
        column = UNIT_COLUMNS[unit]
        if column not in batch:
            raise DispatchError(
                f"unit {unit!r} needs the column {column!r}; the batch has {', '.join(batch.names)}"
            )
        return np.asarray(batch[column], np.int64)
    return np.arange(len(batch))


def masked_copy(batch: Batch) -> Batch:
    """Return the same samples as padding, which is computed but has no effect on results.

    `response_mask` is all False, other ragged floats are 0 (as masked tokens are everywhere) and `padding` is True.
    """
    columns = {}
    for name, values in batch.columns.items():
        zeroed = name == "response_mask" or (
            isinstance(values, Ragged) and values.dtype.kind == "f"
        )
        columns[name] = _zeros(values) if zeroed else values
    return Batch({**columns, PADDING: np.ones(len(batch), np.bool_)})


def _zeros(column: Ragged) -> Ragged:
    """Return the rows filled with zeros, without reading the column's values, which may be in another process."""
    return column.with_values(np.zeros((column.total, *column.inner), column.dtype))


def _lightest(units_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    ids, index_N = np.unique(units_N, return_inverse=True)
    weights = np.bincount(index_N, weights=tokens_N, minlength=len(ids))
    return np.flatnonzero(index_N == int(np.argmin(weights)))


def _collected(results: list[Any], division: Division) -> Any:
    """Combine the results of the nonempty parts into one."""
    kinds = {_kind(result) for result in results}
    if len(kinds) > 1:
        found = ", ".join(f"part {k}: {_kind(result)}" for k, result in enumerate(results))
        raise DispatchError(f"the ranks returned different kinds of results: {found}")
    match kinds.pop():
        case "None":
            return None
        case "Batch":
            return _joined(results, division)
        case "metrics":
            return merge_metrics(results)
        case "tuple":
            columns = zip(*results, strict=True)
            return tuple(_collected(list(column), division) for column in columns)
    return results


def _kind(result: object) -> str:
    if result is None:
        return "None"
    if isinstance(result, Mapping) and all(hasattr(value, "merge") for value in result.values()):
        return "metrics"
    return "tuple" if type(result) is tuple else type(result).__name__


def _joined(results: list[Batch], division: Division) -> Batch:
    parts = [part for part in division.parts_K if len(part)]
    for k, (result, part) in enumerate(zip(results, parts, strict=True)):
        if len(result) != len(part):
            raise DispatchError(
                f"part {k} of the batch has {len(part)} samples, but the method returned {len(result)} for it",
                hint="with the dispatch mode nd, return one sample for each sample received, in the same order",
            )
    joined = Batch.concat(results)
    if division.spare is not None:
        joined = joined.drop([PADDING])
    return joined.take(np.argsort(np.concatenate(parts)))


BUILTIN: dict[str, type[DispatchMode]] = {
    mode.name: mode for mode in (OneToAll, AllToAll, RankZero, Nd)
}


@lru_cache(maxsize=256)
def resolve_mode(spec: ModeSpec) -> DispatchMode:
    """Return the dispatch mode that a declaration names, of core or of an installed plugin.

    Raises:
        PluginError: no usable plugin of kind `dispatch_mode` has that name.
    """
    options = dict(spec.options)
    if spec.name in BUILTIN:
        mode = BUILTIN[spec.name]
        return mode(mode.Config(name=spec.name, **options), PluginContext())
    from dovetail.plugins import load

    config = load.config_class("dispatch_mode", {"name": spec.name})(name=spec.name, **options)
    plugin = load.make_plugin(load.ref_for("dispatch_mode", config), PluginContext())
    if not isinstance(plugin, DispatchMode):
        raise DispatchError(
            f"the plugin {plugin.name!r} is not a DispatchMode but a {type(plugin).__qualname__}"
        )
    return plugin
