"""Checks for NaN and infinity, which stop a step before its update; `faults/step_N.json` in the run directory lists where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.errors import DovetailError, ModelError, NumericsError, listed
from dovetail.interfaces.engine import TrainEngine
from dovetail.interfaces.plugin import Logger
from dovetail.interfaces.reward import Sample
from dovetail.interfaces.stage import StepContext
from dovetail.planning.models import ModelRole
from dovetail.planning.plan import Plan
from dovetail.plugins.load import load_plugin_class
from dovetail.sections import RunConfig
from dovetail.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    from jaxtyping import Int64

PLACES = 32
"""Maximum number of token positions that the fault file (`faults/step_N.json`) lists for a sample and column."""
ROWS = 256
"""Maximum number of samples that the fault file describes; further samples are only named."""
BAD_WEIGHT_SECONDS = 60
"""Seconds for which a model's files are read for the cause of a failed first step: some 100 GB on a fast disk."""

_ENGINE = (
    "the rollout engine's logits overflow: try model.dtype=float32, and check the weights that it was sent "
    "(actor/grad_norm of the steps before)"
)
_MODEL = (
    "the model's logits overflow: resume from an earlier checkpoint with a lower {role}.optim.lr or {role}.grad_clip, "
    "or try model.dtype=float32"
)
_REWARD = "correct the reward: a score that is finite in float64 may still overflow in float32"
_ESTIMATOR = "rewards and values are finite, so the advantage estimator caused it: try another algorithm.advantage"

HINTS: Mapping[str, str] = {
    "rollout_log_probs": _ENGINE,
    "raw_rollout_log_probs": _ENGINE,
    "old_log_probs": _MODEL.format(role="actor"),
    "ref_log_probs": "the reference model's logits overflow: try model.dtype=float32, or another ref.path",
    "values": _MODEL.format(role="critic"),
    "token_rewards": _REWARD,
    "scores": _REWARD,
    "baseline_scores": _REWARD,
    "advantages": _ESTIMATOR,
    "returns": _ESTIMATOR,
}
"""Core's columns of numbers, each with the hint for values that are not finite. Causes precede effects, since an error names the first."""


@attrs.frozen(kw_only=True, eq=False)
class _Found:
    """The non-finite values of one column."""

    column: str
    samples_M: Int64[np.ndarray, "M"]
    """int64 [M]: index in the batch of each sample with such values."""
    bad: Ragged | None
    """Bool [T]: whether a value is non-finite and unmasked; None for a sample-level column."""

    def places(self, batch: Batch, row: int) -> tuple[list[int], list[Any]]:
        """Return the first `PLACES` non-finite values of the sample with index `row`, as texts, after the list of their token positions,
        which is empty for a sample-level column.
        """
        values = batch[self.column]
        if self.bad is None:
            return [], [_text(values[row])]
        positions = np.flatnonzero(self.bad[row])[:PLACES]
        return positions.tolist(), [_text(value) for value in values[row][positions]]


def check_finite(
    batch: Batch,
    columns: Collection[str],
    *,
    step: StepContext,
    directory: RunDirectory,
    writer: Callable[[], str] | None = None,
) -> None:
    """Check that every number is finite, except where response_mask is 0.

    Args:
        batch: a batch with any of the columns.
        columns: names of the columns to check; only floating-point columns are checked.
        step: the current step, with its experience.
        directory: the run directory; `faults/step_N.json` is written into it.
        writer: a function that returns the name of the stage that wrote these columns, for the error's hint; None for a hint by column.

    Raises:
        NumericsError: a number is not finite; the error names the first column, the samples, and the file.
    """
    ordered = [column for column in HINTS if column in columns]
    ordered += sorted(set(columns) - HINTS.keys())
    looked_at = [_find(batch, column) for column in ordered if column in batch]
    found = [part for part in looked_at if part is not None and len(part.samples_M)]
    if not found:
        return
    rows = [row for part in found for row in _rows(batch, part)]
    ids = list(dict.fromkeys(batch["sample_id"][row] for part in found for row in part.samples_M))
    path = _write(directory, step, ids, rows)
    first = found[0]
    named = [batch["sample_id"][row] for row in first.samples_M]
    also = f"; also not finite: {', '.join(part.column for part in found[1:])}" if found[1:] else ""
    unchanged = "" if any(step.updates.values()) else "No weight was changed. "
    raise NumericsError(
        f"{first.column} is not finite in {len(named)} of {len(batch)} samples of step {step.number}: "
        f"{listed(named)}{also}. {unchanged}The samples and values are in {path}",
        hint=f"correct {writer()}, which wrote this column"
        if writer
        else HINTS.get(
            first.column, "correct the stage that writes it (`dovetail plan` shows which)"
        ),
        sample_ids=ids,
    )


def with_fault_file(
    error: NumericsError, *, step: StepContext, directory: RunDirectory
) -> NumericsError:
    """Write the samples that an engine's error names to `faults/step_N.json`, and return an error that also names this file."""
    path = _write(directory, step, list(error.sample_ids), [])
    return NumericsError(
        f"{error.message}; the samples are in {path}",
        hint=error.hint,
        sample_ids=error.sample_ids,
    )


def bad_weights(
    config: RunConfig, models: Iterable[ModelRole], seconds: float
) -> Iterator[ModelError]:
    """Yield an error for each model whose files contain a NaN or infinite weight, reading each model for at most `seconds`."""
    by_path: dict[str, ModelRole] = {}
    for role in models:
        by_path.setdefault(role.path, role)
    for path, role in by_path.items():
        key = "model.path" if path == config.model.path else f"{role.key}.path"
        found = None
        with suppress(Exception):  # other checks report unreadable files
            engine = cast("type[TrainEngine]", load_plugin_class(role.engine))
            found = engine.bad_weight(attrs.evolve(config.model, path=path), seconds)
        if found is not None:
            name, file = found
            yield ModelError(
                f"the model {key}={path} can't be used: its weight {name} in {file} has values that are NaN or infinite",
                hint=f"fetch or export the model again, or set {key}= to another",
            )


def name_bad_weight(error: DovetailError, config: RunConfig, plan: Plan, logger: Logger) -> None:
    """Name the first non-finite weight of the models' files in an error of the first step.

    A model's files are read for at most `BAD_WEIGHT_SECONDS`.
    """
    logger.warning(
        "the first step failed: searching the models' files for weights that are NaN or infinite, "
        f"for at most {BAD_WEIGHT_SECONDS} seconds a model"
    )
    if cause := next(bad_weights(config, plan.models, BAD_WEIGHT_SECONDS), None):
        error.message, error.hint = f"{cause.message}; hence: {error.message}", cause.hint


def _find(batch: Batch, column: str) -> _Found | None:
    """Return a column's non-finite values, if any. Masked values are ignored in columns along the response tokens."""
    values = batch[column]
    if isinstance(values, list) or values.dtype.kind != "f":
        return None
    if not isinstance(values, Ragged):
        finite_N = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        return _Found(column=column, samples_M=np.flatnonzero(~finite_N), bad=None)
    if values.finite():  # known from the worker that made the column: fetches nothing
        return None
    bad_T = ~values.finite_T()
    mask = batch.columns.get("response_mask")
    if mask is not None and np.array_equal(mask.offsets, values.offsets):
        bad_T &= mask.values
    samples_M = np.unique(values.row_index[bad_T])
    return _Found(column=column, samples_M=samples_M, bad=values.with_values(bad_T))


def _text(value: Any) -> Any:
    """Return a number as text, and an array as lists of texts, because JSON has no NaN."""
    return str(value) if np.ndim(value) == 0 else [_text(part) for part in value]


def _rows(batch: Batch, found: _Found) -> list[dict[str, Any]]:
    rows = []
    for row in found.samples_M[:ROWS].tolist():
        positions, values = found.places(batch, row)
        rows.append(
            {
                "sample_id": batch["sample_id"][row],
                "column": found.column,
                "positions": positions,
                "values": values,
            }
        )
    return rows


def _write(
    directory: RunDirectory, step: StepContext, ids: list[str], rows: list[dict[str, Any]]
) -> Path:
    """Write `faults/step_N.json`: all sample ids, and the first samples with prompt, response and faults."""
    (directory.path / "faults").mkdir(exist_ok=True)
    samples: Iterable[Sample] = step.collected.samples if step.collected else ()
    texts = {sample.sample_id: sample for sample in samples}
    described = []
    for sample_id in ids[:ROWS]:
        entry: dict[str, Any] = {"sample_id": sample_id}
        if sample_id in texts:
            sample = texts[sample_id]
            entry |= {"prompt": sample.prompt.raw, "response": sample.text}
        wrong = [row for row in rows if row["sample_id"] == sample_id]
        entry["faults"] = [
            {name: row[name] for name in ("column", "positions", "values")} for row in wrong
        ]
        described.append(entry)
    document = {"step": step.number, "sample_ids": ids, "samples": described}
    return directory.write_json(f"faults/step_{step.number}.json", document)
