"""Passive checks: the first step of a run holds what plugins return against what they declare, and then no step does.

What estimators, filters, losses and corrections return is checked in every step, where it is used. Here are the rollout's
samples, the outcomes of rewards, and the engines' columns and metrics: there are many of them, and one step shows whether
their form is right. What a dataset and a sampler give is checked when it is first asked for (`passive_data.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.errors import PluginBrokenError
from dovetail.metrics import Metric, is_empty
from dovetail.plugins.index import default_index
from dovetail.scoring.scorer import BrokenAnswer

if TYPE_CHECKING:
    from dovetail.experience.generation import Sample
    from dovetail.interfaces.rollout import Completion
    from dovetail.sections import PluginSection

_ROUNDING = 1e-4
"""How far above 0 a log-probability may lie for rounding, in nats."""


class PassiveChecks:
    """The checks of one sitting of a run; they are made in its first step alone."""

    def __init__(self) -> None:
        self._first: int | None = None

    def due(self, step: int) -> bool:
        """Whether this is the first step that asks."""
        self._first = step if self._first is None else self._first
        return step == self._first

    def rollout(
        self, step: int, samples: Iterable[Sample], section: PluginSection, longest: int
    ) -> None:
        """Check every completion of a step.

        Args:
            step: number of the step.
            samples: all of the step.
            section: that selects the rollout.
            longest: tokens that a response may have.

        Raises:
            PluginBrokenError: a completion is not as BaseRollout says; names the plugin with its version.
        """
        if not self.due(step):
            return
        for sample in samples:
            if problem := _completion_problem(sample.completion, longest):
                raise _broken("rollout", section, f"sample {sample.sample_id!r}: {problem}")

    def scored(
        self, step: int, batch: Batch, found: Batch, outputs: Sequence[str], section: PluginSection
    ) -> None:
        """Check the columns of a forward pass.

        Args:
            step: number of the step.
            batch: what was scored.
            found: what `forward` returned.
            outputs: what it was asked for.
            section: that selects the engine.

        Raises:
            PluginBrokenError: a column is missing, or not as TrainEngine says; names the plugin with its version.
        """
        if not self.due(step):
            return
        for name in outputs:
            if name not in found:
                raise _broken("engine", section, f"forward returned no column {name!r}")
            if problem := _column_problem(found[name], batch["response_mask"]):
                raise _broken("engine", section, f"forward returned {name!r} {problem}")

    def outcomes(self, step: int, samples: Iterable[Sample], section: PluginSection) -> None:
        """Check that every sample's outcome is one that the reward manager gave as it should.

        Args:
            step: number of the step.
            samples: scored.
            section: that selects the manager.

        Raises:
            PluginBrokenError: an answer of the manager was no list of outcomes; names the plugin with its version.
        """
        if not self.due(step):
            return
        for sample in samples:
            if isinstance(sample.outcome, BrokenAnswer):
                raise _broken("reward_manager", section, sample.outcome.message)

    def updated(self, step: int, found: object, role: str, section: PluginSection) -> None:
        """Check the metrics of an update.

        Args:
            step: number of the step.
            found: what `update` returned, joined over ranks.
            role: that was updated, for messages.
            section: that selects the engine.

        Raises:
            PluginBrokenError: a metric is none, has another name, or is not finite; names the plugin with its version.
        """
        if not self.due(step):
            return
        if isinstance(found, list) and found:
            found = found[0]  # of the first rank: what can't be merged comes back as it is
        if not isinstance(found, Mapping):
            raise _broken("engine", section, f"update returned {_form(found)}, not metrics by name")
        for name, metric in found.items():
            if problem := _metric_problem(name, metric, role):
                raise _broken("engine", section, f"update returned the metric {name!r} {problem}")


def _metric_problem(name: object, metric: object, role: str) -> str | None:
    """What is wrong with a metric of an update, in words. One over nothing has no figure, and `values` leaves it out."""
    if not isinstance(name, str) or not all(name.partition("/")):
        return f"of the {role}, whose metrics are named {role}/…, or after whoever adds them"
    if not isinstance(metric, Metric):
        return f"as {_form(metric)}, which can't be merged with those of other mini-batches"
    value = metric.value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return f"with the value {value!r:.60}, which is no number"
    return None if is_empty(metric) or math.isfinite(value) else f"with the value {value:g}"


def _completion_problem(completion: Completion, longest: int) -> str | None:
    """What is wrong with a completion of T tokens, in words."""
    ids_T = completion.response_ids
    if not isinstance(ids_T, np.ndarray) or ids_T.dtype != np.int64 or ids_T.ndim != 1:
        return f"response_ids is {_form(ids_T)}, not int64 [T]"
    if len(ids_T) > longest:
        return f"it has {len(ids_T)} tokens, and at most {longest} were asked for"
    versions_T = completion.weight_versions
    if not isinstance(versions_T, np.ndarray) or versions_T.shape != ids_T.shape:
        return f"weight_versions is {_form(versions_T)}, not int64 [{len(ids_T)}]"
    if versions_T.dtype != np.int64:
        return f"weight_versions is {_form(versions_T)}, not int64 [{len(ids_T)}]"
    for name in ("log_probs", "raw_log_probs"):
        values_T = getattr(completion, name)
        if values_T is None:
            continue
        if not isinstance(values_T, np.ndarray) or values_T.shape != ids_T.shape:
            return f"{name} is {_form(values_T)}, not float32 [{len(ids_T)}]"
        if values_T.dtype != np.float32:
            return f"{name} is {_form(values_T)}, not float32 [{len(ids_T)}]"
        if (values_T > _ROUNDING).any():
            return f"{name} holds {values_T.max():g}, and no log-probability is above 0"
    return None


def _column_problem(column: object, mask: Ragged) -> str | None:
    """What is wrong with an engine's column, in words. One that lies on a worker is not fetched for it."""
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


def _form(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _broken(kind: str, section: PluginSection, problem: str) -> PluginBrokenError:
    return PluginBrokenError(
        f"{_title(kind, section)}: {problem}",
        hint=f"`dovetail plugins check {kind}/{section.name}` finds more; report it to the plugin's author"
        if section.name
        else "mend the file",
    )


def _title(kind: str, section: PluginSection) -> str:
    """The plugin with its distribution and version, or its file."""
    if section.path is not None or section.name is None:
        return f"{kind} {section.attribute} of {section.path}"
    return default_index().find(kind, section.name).title
