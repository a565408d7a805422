"""CounterDelta: increments since the last reading, computed from a server's totals since its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dovetail.metrics import Metric

Totals = Mapping[str, float]


class CounterDelta:
    """Turns a server's running totals into metrics for the time since the last call.

    Args:
        prefix: the prefix of the metrics' names, such as `rollout/vllm/`.
        counted: the name of the total that must have grown for metrics to be reported.
        metrics: a function that returns the metrics, given the growth of the totals and the totals themselves.
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
        """Return the metrics since the previous totals; empty if `counted` has not grown.

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
