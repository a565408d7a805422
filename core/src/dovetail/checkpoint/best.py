"""Tracking of the best checkpoint by a validation metric."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dovetail.checkpoint.mark import Mark
from dovetail.checkpoint.store import CheckpointStore
from dovetail.errors import nearest
from dovetail.interfaces.plugin import Logger
from dovetail.sections import TrainerSection

_SMALLER_IS_BETTER = ("/loss", "/perplexity")


class Best:
    """Tracker of the best value so far of one validation metric. The checkpoint store keeps this value across resumes."""

    def __init__(
        self, store: CheckpointStore, metric: str, *, largest: bool = True, logger: Logger = None
    ) -> None:
        """Track a metric.

        Args:
            store: the store of the checkpoints, which marks the best one.
            metric: the name of a validation metric, such as `val/mean@1`.
            largest: whether the largest value is the best; otherwise the smallest is.
            logger: a logger with the standard methods, which warns of a missing metric.
        """
        self.metric = metric
        self._store = store
        self._largest = largest
        self._logger = logger
        self._warned = False

    @classmethod
    def of(
        cls, trainer: TrainerSection, store: CheckpointStore, logger: Logger = None
    ) -> Best | None:
        """Return a tracker of `trainer.best_metric`; None if no such metric is configured."""
        if trainer.best_metric is None:
            return None
        is_loss = trainer.best_metric.endswith(_SMALLER_IS_BETTER)
        largest = not is_loss if trainer.best_is == "auto" else trainer.best_is == "max"
        return cls(store, trainer.best_metric, largest=largest, logger=logger)

    def improved(self, metrics: Mapping[str, float]) -> Mark | None:
        """Return the metric and its value if the value is the best so far, else None.

        A value that is not finite is never better. A missing metric is logged once as a warning, with the nearest existing name. An
        earlier best checkpoint by another metric, or one that no longer exists, is ignored.
        """
        value = metrics.get(self.metric)
        if value is None:
            self._warn(metrics)
            return None
        if not math.isfinite(value):
            return None
        before = self._store.best()
        if before is not None and before.metric == self.metric:
            better = value > before.value if self._largest else value < before.value
            if not better:
                return None
        return Mark(metric=self.metric, value=value)

    def _warn(self, metrics: Mapping[str, float]) -> None:
        if self._warned or self._logger is None:
            return
        self._warned = True
        self._logger.warning(
            "trainer.best_metric is not among the metrics of this validation: no checkpoint is marked as the best",
            best_metric=self.metric,
            nearest=nearest(self.metric, metrics),
            figures=sorted(name for name in metrics if not name.endswith(("/low", "/high"))),
        )
