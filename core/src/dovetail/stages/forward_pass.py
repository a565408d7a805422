"""One forward pass of a role, and the check of what its engine returned."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.interfaces.stage import StepContext
from dovetail.plugins.titles import broken_plugin


def forward(batch: Batch, step: StepContext, role: str, columns: Mapping[str, str]) -> Batch:
    """Return the batch with columns from a role's forward pass.

    Args:
        batch: N samples; see `TrainEngine.forward`.
        step: the step that is under way.
        role: whose model computes.
        columns: each column, and the engine's output that it is.

    Raises:
        PluginBrokenError: in the first step: the engine returned something else than float32 columns over response tokens.
    """
    scored: Batch = step.roles[role].forward(batch, frozenset(columns.values())).result()
    if step.first:
        engine = step.facts.engine(role).config
        for output in sorted(columns.values()):
            if output not in scored:
                raise broken_plugin("engine", engine, f"forward returned no column {output!r}")
            if problem := _problem(scored[output], batch["response_mask"]):
                raise broken_plugin("engine", engine, f"forward returned {output!r} {problem}")
    return batch.with_columns({column: scored[output] for column, output in columns.items()})


def _problem(column: object, mask: Ragged) -> str | None:
    """What is wrong with an engine's column. One that lies on a worker is not fetched for it."""
    if not isinstance(column, Ragged) or type(column) is not type(mask):
        return None
    if column.dtype != np.float32:
        return f"as {column.dtype}, not float32"
    if not np.array_equal(column.offsets, mask.offsets):
        return f"for {len(column.values)} tokens, not one value for each of the {len(mask.values)} response tokens"
    left = np.count_nonzero(column.values[~mask.values.astype(bool)])
    if left:
        return f"with values on {left} masked tokens, which hold 0"
    return None
