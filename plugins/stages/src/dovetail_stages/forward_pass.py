"""One forward pass of a role, and the check of what its engine returned."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dovetail.batch import Batch, Ragged, sizes_of
from dovetail.interfaces import OUTPUTS, OutputSpec, StepContext
from dovetail.plugins import broken_plugin


def forward(
    batch: Batch, step: StepContext, role: str, columns: Mapping[str, str | OutputSpec]
) -> Batch:
    """Return the batch with columns from a role's forward pass.

    Args:
        batch: N samples; see `TrainEngine.forward`.
        step: the running step.
        role: the role of the model.
        columns: each new column's name → the engine's output that the column gets. The output is given by name, or as an `OutputSpec`
            if the caller chooses its size, such as K for the K most likely tokens.

    Raises:
        PluginBrokenError: the engine did not return these columns over response tokens; checked in the first step only.
    """
    scored: Batch = step.roles[role].forward(batch, frozenset(columns.values())).result()
    specs = {c: OUTPUTS[o] if isinstance(o, str) else o for c, o in columns.items()}
    if step.first:
        engine = step.facts.engine(role).config
        for output in sorted(specs.values(), key=lambda spec: spec.name):
            if output.name not in scored:
                raise broken_plugin("engine", engine, f"forward returned no column {output.name!r}")
            if problem := _problem(scored[output.name], batch["response_mask"], output):
                raise broken_plugin("engine", engine, f"forward returned {output.name!r} {problem}")
    return batch.with_columns({column: scored[spec.name] for column, spec in specs.items()})


def _problem(column: object, mask: Ragged, output: OutputSpec) -> str | None:
    """Return what is wrong with an engine's column; None if nothing is. A column that lies on a worker is not fetched, and passes."""
    if not isinstance(column, Ragged) or type(column) is not type(mask):
        return None
    if column.dtype != np.dtype(output.dtype) or column.inner != output.inner:
        expected = f"{output.dtype} {sizes_of('T', *output.inner)}"
        return f"as {column.dtype} {sizes_of('T', *column.inner)}, not {expected}"
    if not np.array_equal(column.offsets, mask.offsets):
        return f"for {len(column.values)} tokens, not one value for each of the {len(mask.values)} response tokens"
    left = np.count_nonzero(column.values[~mask.values.astype(bool)])
    if left:
        return f"with values other than 0 on {left} masked tokens; expected 0"
    return None
