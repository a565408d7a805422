"""The accuracy of a run: which metric of validation its summary follows, from the first validation to the last."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from dovetail.experience.validation import CORRECT, main_metric
from dovetail.interfaces.plugin import Logger
from dovetail.run.checkpoints import RunState


class AccuracyKeeper:
    """Keeps the run's accuracy up to date, before and after, as values of one metric.

    Args:
        logger: of the run; it warns where a validation lacks the metric.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._warned = False

    def updated(self, state: RunState, metrics: Mapping[str, float], n: int) -> RunState:
        """The state after a validation.

        The first validation with figures chooses the metric. One that lacks it leaves the accuracy at its former value.
        After a change of `rollout.validation.n` the metric is chosen anew, and what was measured before it is dropped.

        Args:
            state: before the validation.
            metrics: of the validation, as `validation_metrics` gives them.
            n: responses a prompt.
        """
        metric = state.accuracy_metric or main_metric(metrics, n)
        scored = f"val/mean@{n}" in metrics
        if scored and not metric.endswith(f"@{n}"):
            anew = main_metric(metrics, n)
            self._logger.warning(
                f"rollout.validation.n is {n} now, so that there is no {metric}: from here on the summary tells {anew}, "
                "and nothing of the validations before",
                step=state.step,
            )
            state = attrs.evolve(state, accuracy_before=None, accuracy_after=None)
            metric = anew
        if metric in metrics:
            return _with_value(state, metric, metrics[metric])
        if scored and not self._warned:
            self._warned = True
            self._logger.warning(
                f"this validation has no {metric}: not every scored response has one of the components "
                f"{', '.join(CORRECT)}; the summary keeps the accuracy of an earlier validation",
                step=state.step,
            )
        return state


def _with_value(state: RunState, metric: str, value: float) -> RunState:
    first = state.accuracy_before is None and state.step == 0
    return attrs.evolve(
        state,
        accuracy_metric=metric,
        accuracy_before=value if first else state.accuracy_before,
        accuracy_after=None if first else value,
    )
