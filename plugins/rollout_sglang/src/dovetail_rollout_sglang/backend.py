"""SglangBackend: an SGLang server over HTTP, started by the replica or by hand."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.interfaces import PluginContext
from dovetail.metrics import Metric
from dovetail_rollout_sglang.checks import join
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.engine_args import server_command
from dovetail_rollout_sglang.environment import TOKEN_VARIABLE, variables
from dovetail_rollout_sglang.failures import FAILURES
from dovetail_rollout_sglang.server_metrics import server_metrics
from dovetail_rollout_sglang.versions import require
from dovetail_serving import (
    LOOPBACK,
    OwnServer,
    ServerBackend,
    ServerConnection,
    log_path,
    port_for,
)


class SglangBackend(ServerBackend):
    """Backend of a replica on one SGLang server."""

    engine = "SGLang"
    token_variable = TOKEN_VARIABLE

    def __init__(self, config: SglangRolloutConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._metrics = server_metrics()

    def start_server(self, token: str) -> OwnServer:
        """Start an SGLang server for this replica, on the loopback interface.

        Raises:
            PluginNeedsError: SGLang is missing, or this plugin does not support its version.
            ConfigError: the replica's ranks can't divide the model.
            RolloutError: the port is in use.
        """
        config, context = self.config, self.context
        require(context.logger)
        port = port_for(config.port, context.rank, self.engine)
        server = OwnServer(
            server_command(config, context, host=LOOPBACK, port=port),
            port=port,
            log=log_path("sglang", context),
            environment=variables(config, context, token),
            failures=FAILURES,
            config=config,
        )
        context.logger.info("SGLang server %s starts; it prints to %s", server.url, server.log)
        return server

    async def join(self, connection: ServerConnection) -> None:
        await join(connection, self.config, self.context)

    def metrics_from(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        return self._metrics.since(totals)
