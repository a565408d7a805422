"""CounterDelta: increments since the last reading, computed from a server's totals since its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dovetail.metrics import Metric

Totals = Mapping[str, float]


class CounterDelta:
    """Computes metrics for the time since the previous call of `since`, from totals that a server counts since its start.

    Args:
        prefix: the prefix of the metrics' names, such as `rollout/vllm/`.
        counted: the name of one total; if it has not grown, there are no metrics.
        metrics: a function that returns the metrics. Its first argument has each total's growth since the previous call, its second
            argument the totals.
    """

    def __init__(
        self,
        prefix: str,
        counted: str,
        metrics: Callable[[Totals, Totals], Mapping[str, Metric]],
    ) -> None:
        self._prefix, self._counted, self._metrics = prefix, counted, metrics
        self._before: Totals = {}

    def since(self, totals: Totals) -> Mapping[str, Metric]:
        """Return the metrics for the time since the previous call; empty if the total `counted` has not grown.

        Args:
            totals: the server's totals since its start, by name.
        """
        before, self._before = self._before, dict(totals)
        grown = {name: value - before.get(name, 0.0) for name, value in totals.items()}
        if not grown[self._counted]:
            return {}
        return {
            f"{self._prefix}{name}": metric for name, metric in self._metrics(grown, totals).items()
        }
