"""The glossary of columns: name, dtype, shape, meaning and owner of everything that flows through a step.

Legend: N samples, P prompt tokens, T response tokens. Log-probabilities are in nats; masked tokens hold 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from dovetail.errors import ColumnError, nearest

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch

Raggedness = Literal["dense", "ragged", "either", "object"]

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "object"),
)
"""Dtypes that a column may have."""


@dataclass(frozen=True)
class Column:
    """The declaration of one named column of a batch."""

    name: str
    """Name of the column. The name of a column that a plugin adds begins with the plugin's package: `mypackage.name`."""
    dtype: str
    """NumPy dtype name, or `object` for JSON values."""
    shape: Raggedness
    """`dense`: [N]; `ragged`: one row of values a sample, packed [T]; `either`: dense or ragged; `object`: a list of N JSON values."""
    meaning: str
    owner: str
    """The stage or plugin kind that writes the column."""
    along: str | None = None
    """For a ragged column: another ragged column whose rows have the same lengths, because both have one value for each token."""
    inner: tuple[int | None, ...] = ()
    """Shape of one value: `(3,)` turns [T] into [T, 3], and [N] into [N, 3]. None is a size that differs between runs."""

    def __post_init__(self) -> None:
        """Check dtype, shape and inner shape.

        Raises:
            ColumnError: a column can't have this dtype, shape or inner shape.
        """
        object.__setattr__(self, "inner", tuple(self.inner))  # a manifest gives a list
        sizes = all(size is None or (type(size) is int and size > 0) for size in self.inner)
        if not sizes or (self.inner and self.shape == "object"):
            raise ColumnError(
                f"the column {self.name!r} has inner = {self.inner!r}; expected "
                + (
                    "(), because JSON values have no inner shape"
                    if self.shape == "object"
                    else "sizes of 1 or more, or None for a size that differs between runs"
                )
            )
        for what, value, allowed in (
            ("shape", self.shape, get_args(Raggedness)),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                near = nearest(str(value), allowed)
                raise ColumnError(
                    f"the column {self.name!r} has {what} = {value!r}; expected one of {', '.join(map(repr, allowed))}",
                    hint=f"did you mean {near!r}?" if near else None,
                )

    def __str__(self) -> str:
        """Dtype and shape, such as `float32 ragged [T, 3]`."""
        first = "N" if self.shape == "dense" else "T"
        return f"{self.dtype} {self.shape}" + (
            f" {sizes_of(first, *self.inner)}" if self.inner else ""
        )


_COLUMNS = (
    # Identity
    Column("sample_id", "object", "object", "unique name of the sample in the run", "loader"),
    Column("epoch", "int64", "dense", "pass over the data in which the prompt was issued", "loader"),
    Column("prompt_id", "int64", "dense", "row of the dataset, before filtering", "loader"),
    Column("attempt", "int64", "dense", "how often this prompt was issued before in its epoch", "loader"),
    Column("sample_index", "int64", "dense", "which of the prompt's n samples this is", "rollout"),
    Column("pair_id", "int64", "dense", "samples with one pair_id are compared with each other", "the data"),
    Column("chosen", "bool", "dense", "whether it is its pair's preferred response", "data"),
    Column("margin", "float32", "dense", "by how much its pair's chosen response was rated above the rejected one", "data"),
    Column("desirable", "bool", "dense", "whether a response that was rated alone is wanted", "data"),
    Column("group_id", "int64", "dense", "samples with one group_id answer one prompt", "rollout"),
    Column("trajectory_id", "int64", "dense", "sequences with one trajectory_id come from one episode", "rollout"),
    Column("sequence_index", "int64", "dense", "which of its trajectory's sequences this is", "rollout"),
    Column("turn_ids", "int64", "ragged", "which of its episode's turns produced the token; −1 where the policy did not", "rollout", "response_ids"),
    Column("trajectory", "object", "object", "what happened in the episode: `Trajectory.as_json`", "rollout"),
    Column("padding", "bool", "dense", "True on copies that keep an otherwise idle rank in step: fully masked, and removed again", "dispatch"),
    # Tokens
    Column("data_source", "object", "object", "`data_source` of the dataset's row; null where it has none", "loader"),
    Column("prompt_ids", "int64", "ragged", "tokens before the response as the engine saw them", "loader"),
    Column("media", "object", "object", "images by reference, in the order of their tokens: `kind`, `digest`, `path`", "loader"),
    Column("image_mask", "bool", "ragged", "True on the tokens of an example's response that stand for images; absent where only prompts have some", "data", "response_ids"),
    Column("response_ids", "int64", "ragged", "response tokens, stop token included; of an episode, what the policy was shown besides", "rollout"),
    Column("response_mask", "bool", "ragged", "True where the policy produced the token", "rollout", "response_ids"),
    Column("token_weight_versions", "int64", "ragged", "version of the weights behind each token; −1 where the policy did not produce it", "rollout", "response_ids"),
    Column("finish_reason", "object", "object", "stop, length or abort", "rollout"),
    Column("temperature", "float32", "dense", "sampling temperature of the sample", "rollout"),
    # Log-probabilities and other outputs of a forward pass
    Column("rollout_log_probs", "float32", "ragged", "under the sampler as used (temperature, top-p, top-k); 0 where the policy did not produce the token", "rollout", "response_ids"),
    Column("raw_rollout_log_probs", "float32", "ragged", "by the rollout engine, full softmax of logits / temperature; 0 where the policy did not produce the token", "rollout", "response_ids"),
    Column("old_log_probs", "float32", "ragged", "of the policy before this step's updates, full softmax", "actor", "response_ids"),
    Column("ref_log_probs", "float32", "ragged", "of the reference policy, full softmax", "ref", "response_ids"),
    Column("log_probs", "float32", "ragged", "of the policy as it is now, full softmax", "actor", "response_ids"),
    Column("entropies", "float32", "ragged", "entropy of the policy at each token, in nats", "actor", "response_ids"),
    Column("sum_pi_squared", "float32", "ragged", "sum of squared probabilities at each token", "actor", "response_ids"),
    Column("values", "float32", "ragged", "value function at each token", "critic", "response_ids"),
    Column("loss_mask", "bool", "ragged", "True on the tokens that keep their loss: part of response_mask", "rollout_correction", "response_ids"),
    Column("rollout_is_weights", "float32", "ragged", "importance weight of each token, training over rollout policy", "rollout_correction", "response_ids"),
    # Rewards and what follows from them
    Column("scores", "float32", "dense", "reward of the trajectory: the sum of the token rewards of its sequences", "reward"),
    Column("token_rewards", "float32", "ragged", "reward at each token; a scalar one sits on the last token with mask 1 of the last sequence", "reward", "response_ids"),
    Column("reward_components", "object", "object", "named parts of the reward", "reward"),
    Column("baseline_scores", "float32", "dense", "reward of the greedy response to the same prompt", "baseline"),
    Column("advantages", "float32", "either", "advantage of a sample or of each token", "advantage", "response_ids"),
    Column("returns", "float32", "either", "target of the value function", "advantage", "response_ids"),
)  # fmt: skip

GLOSSARY: dict[str, Column] = {column.name: column for column in _COLUMNS}


def glossary(extra: Iterable[Column] = ()) -> dict[str, Column]:
    """Return the declared columns by name: the columns of core, and `extra`, which plugins declare.

    Raises:
        ColumnError: a plugin redefines a column with another dtype, shape or inner shape.
    """
    known = dict(GLOSSARY)
    for column in extra:
        other = known.setdefault(column.name, column)
        if (other.dtype, other.shape, other.inner) != (column.dtype, column.shape, column.inner):
            raise ColumnError(
                f"column {column.name!r} is declared as {column} by {column.owner}, but as {other} by "
                f"{other.owner}",
                hint="prefix a plugin's own column with its package name",
            )
    return known


def check_batch(batch: Batch, glossary: Mapping[str, Column] = GLOSSARY) -> None:
    """Check every column of a batch against its declaration in the glossary: name, dtype, shape, and lengths of rows.

    Raises:
        ColumnError: columns are undeclared or differ from their declarations; the error lists one problem for each.
    """
    if complaints := complaints_about(batch, glossary):
        raise ColumnError(
            "columns of the batch differ from their declarations: " + "; ".join(complaints),
            hint="declare a plugin's own columns in its `columns` attribute"
            if any("unknown" in complaint for complaint in complaints)
            else None,
        )


def complaints_about(batch: Batch, glossary: Mapping[str, Column]) -> list[str]:
    """Return the problems that `check_batch` would report, one text for each wrong column; empty if all columns are right."""
    return [
        complaint
        for name, values in batch.columns.items()
        if (complaint := _complaint(name, values, batch, glossary))
    ]


def _complaint(name: str, values: Any, batch: Batch, glossary: Mapping[str, Column]) -> str | None:
    column = glossary.get(name)
    if column is None:
        near = nearest(name, glossary)
        return f"{name!r} is unknown" + (f" (nearest: {near!r})" if near else "")
    is_object = isinstance(values, list)
    is_ragged = hasattr(values, "offsets")
    found = "object" if is_object else "ragged" if is_ragged else "dense"
    if found != column.shape and (column.shape != "either" or is_object):
        return f"{name!r} is {found}, not {column.shape}"
    if not is_object and values.dtype != column.dtype:
        return f"{name!r} has dtype {values.dtype}, not {column.dtype}"
    if not is_object and not _fits(inner := _inner(values), column.inner):
        first = len(values) if found == "dense" else "T"
        return f"{name!r} has shape {sizes_of(first, *inner)}, not {sizes_of(first, *column.inner)}"
    if is_ragged and column.along and column.along in batch:
        return _misaligned(name, values.lengths, column.along, batch[column.along].lengths)
    return None


def _inner(values: Any) -> tuple[int, ...]:
    """Return the shape of one value of a column."""
    return tuple(values.inner if hasattr(values, "offsets") else values.shape[1:])


def _fits(inner: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return len(inner) == len(declared) and all(
        size in (None, own) for own, size in zip(inner, declared, strict=True)
    )


def sizes_of(*sizes: int | str | None) -> str:
    """Return a shape as text, such as `[T, 3]`; an unknown size is `?`."""
    return f"[{', '.join('?' if size is None else str(size) for size in sizes)}]"


def _misaligned(name: str, lengths_N: Any, along: str, expected_N: Any) -> str | None:
    for row, (length, expected) in enumerate(zip(lengths_N, expected_N, strict=True)):
        if length != expected:
            return f"{name!r} has {length} values in row {row}, but {along!r} has {expected}"
    return None
