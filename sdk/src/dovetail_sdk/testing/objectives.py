"""An objective on given outputs, run as in an engine: a mini-batch is prepared and cut, and its terms are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from dovetail.batch import Batch
from dovetail.interfaces import (
    OUTPUTS,
    LocalReduction,
    Objective,
    ObjectiveSpec,
    ObjectiveTerm,
    OutputSpec,
    PluginConfig,
    PluginRef,
    Reduction,
)
from dovetail.metrics import Metric
from dovetail_stages import prepare_mini_batch, resolve_metrics


class PlannedObjective(Objective):
    """An objective on log-probabilities for tests that only plan runs."""

    name = "planned"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"response_mask"})

    @classmethod
    def outputs(cls, config: PluginConfig) -> tuple[OutputSpec, ...]:
        return (OUTPUTS["log_probs"],)

    def denominators(self, mini_batch: Batch, reduction: Reduction) -> dict[str, float]:
        raise NotImplementedError

    def term(self, *args: Any) -> ObjectiveTerm:
        raise NotImplementedError


@attrs.frozen(kw_only=True, eq=False)
class ObjectiveUpdate:
    """The result of an objective on a mini-batch."""

    loss: float
    gradients: dict[str, np.ndarray]
    """Gradient of the loss with respect to each output, of the output's shape."""
    metrics: dict[str, Metric]
    finite: bool


def spec_of(goal: Objective, scalars: Mapping[str, float] | None = None) -> ObjectiveSpec:
    """Return the spec of an objective object whose plugin need not be installed."""
    return goal.spec(PluginRef(kind="objective", name=goal.name, config=goal.config), scalars or {})


def update_of(
    goal: Objective,
    mini_batch: Batch,
    outputs: Mapping[str, np.ndarray],
    *,
    parts: Sequence[Sequence[int]] | None = None,
    reduction: Reduction | None = None,
    scalars: Mapping[str, float] | None = None,
) -> ObjectiveUpdate:
    """Compute loss, gradients and metrics of an objective from a mini-batch and model outputs.

    Args:
        goal: the objective.
        mini_batch: this rank's part of the mini-batch.
        outputs: the model's outputs: a float array [T, …] for each name.
        parts: sample indices of each micro-batch; by default one micro-batch holds all samples.
        reduction: sums over ranks; by default there is one rank.
        scalars: values of the objective's scalars that differ from the defaults.
    """
    spec = spec_of(goal, scalars)
    prepared, denominators = prepare_mini_batch(
        goal, spec, mini_batch, reduction or LocalReduction()
    )
    leaves = {name: torch.tensor(outputs[name], requires_grad=True) for name in spec.output_names}
    offsets = mini_batch["response_mask"].offsets
    loss: Any = 0.0
    metrics, finite = [], True
    for part in parts or [range(len(mini_batch))]:
        own = [np.arange(offsets[row], offsets[row + 1]) for row in part]
        tokens_T = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *own]))
        chosen = {name: leaf[tokens_T] for name, leaf in leaves.items()}
        micro_batch = prepared.take(np.array(part, np.int64))
        term = goal.term(chosen, micro_batch, denominators, spec.scalars)
        loss = loss + term.loss
        metrics.append(term.metrics)
        finite &= bool(term.finite)
    loss.backward()
    return ObjectiveUpdate(
        loss=loss.item(),
        gradients={
            name: np.zeros_like(outputs[name]) if leaf.grad is None else leaf.grad.numpy()
            for name, leaf in leaves.items()
        },
        metrics=resolve_metrics(metrics),
        finite=finite,
    )
