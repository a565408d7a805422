"""MetricsEndpoint: vLLM's own Prometheus metrics of an engine that is driven from this process, for whoever scrapes them."""

from __future__ import annotations

from typing import Any

from dovetail.errors import RolloutError
from dovetail.serving.process import LOOPBACK


class MetricsEndpoint:
    """Answers `/metrics` on the loopback interface until it is closed.

    Args:
        port: to listen on.

    Attributes:
        url: of the metrics.

    Raises:
        RolloutError: it can't listen there.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import (  # type: ignore[import-not-found, unused-ignore]
            start_http_server,
        )
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        self.url = f"http://{LOOPBACK}:{port}/metrics"
        try:
            self._server, self._thread = start_http_server(
                port, addr=LOOPBACK, registry=get_prometheus_registry()
            )
        except OSError as error:
            raise RolloutError(
                f"vLLM's metrics can't be served at {self.url}: {error.strerror}",
                hint="set rollout.metrics_port to another port, or leave it out",
            ) from error

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def prometheus_logger() -> Any:
    """The class of vLLM's logger that fills them."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    return PrometheusStatLogger
