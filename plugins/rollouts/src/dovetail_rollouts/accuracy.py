"""The accuracy of a run: which metric of validation its summary follows, from the first validation to the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import Logger
from dovetail_rollouts.validation import CORRECT, main_metric


class Accuracy:
    """The values of one accuracy metric before and after the run.

    Args:
        logger: the logger of the run; it warns where a validation lacks the metric.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._warned = False
        self.metric: str | None = None
        self.before: float | None = None
        self.after: float | None = None

    metric: str | None
    """`val/acc@n`, or `val/mean@n` where the reward does not say what is right."""
    before: float | None
    """Its value before the first step."""
    after: float | None
    """Its latest value since."""

    def update(self, metrics: Mapping[str, float], n: int, step: int) -> None:
        """Take in a validation.

        The first one with figures chooses the metric. One that lacks it leaves the accuracy at its former value. After a change of
        `rollout.validation.n` the metric is chosen anew, and what was measured before it is dropped.

        Args:
            metrics: the metrics of the validation, as `validation_metrics` gives them.
            n: responses a prompt.
            step: finished steps.
        """
        metric = self.metric or main_metric(metrics, n)
        scored = f"val/mean@{n}" in metrics
        if scored and not metric.endswith(f"@{n}"):
            anew = main_metric(metrics, n)
            self._logger.warning(
                f"rollout.validation.n is {n} now, so that there is no {metric}: from here on the summary tells {anew}, "
                "and nothing of the validations before",
                step=step,
            )
            self.before = self.after = None
            metric = anew
        if metric in metrics:
            self.metric, value = metric, metrics[metric]
            first = self.before is None and step == 0
            self.before = value if first else self.before
            self.after = None if first else value
        elif scored and not self._warned:
            self._warned = True
            self._logger.warning(
                f"this validation has no {metric}: not every scored response has one of the components "
                f"{', '.join(CORRECT)}; the summary keeps the accuracy of an earlier validation",
                step=step,
            )

    def state(self) -> dict[str, Any]:
        """Return the values as the run's summary stores them."""
        return {
            "accuracy_metric": self.metric,
            "accuracy_before": self.before,
            "accuracy_after": self.after,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was written."""
        self.metric = state["accuracy_metric"]
        self.before, self.after = state["accuracy_before"], state["accuracy_after"]
