"""MetricsEndpoint: an HTTP endpoint for vLLM's Prometheus metrics of an engine that this process drives."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from dovetail.errors import RolloutError
from dovetail_serving import LOOPBACK


class MetricsEndpoint:
    """Serves `/metrics` on the loopback interface until closed.

    A process can have one endpoint: vLLM has one registry of metrics a process, in which a new engine's metrics replace those of the
    engine before.

    Args:
        port: the port to listen on.

    Attributes:
        url: the URL of the metrics.

    Raises:
        RolloutError: the port is in use, or this process has an open endpoint.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _open: ClassVar[MetricsEndpoint | None] = None

    def __init__(self, port: int) -> None:
        from prometheus_client import (  # type: ignore[import-not-found, unused-ignore]
            start_http_server,
        )
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        self.url = f"http://{LOOPBACK}:{port}/metrics"
        with MetricsEndpoint._lock:
            other = MetricsEndpoint._open
            if other is not None:
                raise RolloutError(
                    f"rollout.metrics_port serves only one replica in a process, and this process already serves one at {other.url}",
                    hint="set runtime=ray or rollout.mode=server, where replicas have processes of their own, or leave "
                    "rollout.metrics_port out",
                )
            try:
                self._server, self._thread = start_http_server(
                    port, addr=LOOPBACK, registry=get_prometheus_registry()
                )
            except OSError as error:
                raise RolloutError(
                    f"vLLM's metrics can't be served at {self.url}: {error.strerror}",
                    hint="set rollout.metrics_port to another port, or leave it out",
                ) from error
            MetricsEndpoint._open = self

    def close(self) -> None:
        """Stop listening; afterwards this process may open another endpoint."""
        with MetricsEndpoint._lock:
            if MetricsEndpoint._open is self:
                MetricsEndpoint._open = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def prometheus_logger() -> Any:
    """Return the class of vLLM's stat logger that fills the Prometheus metrics."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    return PrometheusStatLogger
