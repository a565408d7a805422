"""TrtllmBackend: TensorRT-LLM behind HTTP, a server of the replica's own or one that was started by hand."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.interfaces import PluginContext
from dovetail.metrics import Metric
from dovetail.serving import (
    LOOPBACK,
    OwnServer,
    ServerBackend,
    ServerConnection,
    log_path,
    port_for,
)
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.failures import FAILURES
from dovetail_rollout_trtllm.figures import figures
from dovetail_rollout_trtllm.joining import join
from dovetail_rollout_trtllm.server_command import server_command
from dovetail_rollout_trtllm.surroundings import TOKEN_VARIABLE, variables
from dovetail_rollout_trtllm.versions import DESCRIBED, require


class TrtllmBackend(ServerBackend):
    """One engine in a process of its own, which its workers start from."""

    engine = "TensorRT-LLM"
    token_variable = TOKEN_VARIABLE

    def __init__(self, config: TrtllmRolloutConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._figures = figures()

    def start_server(self, token: str) -> OwnServer:
        release = require()
        context = self.context
        if release > DESCRIBED:
            context.logger.warning(
                "TensorRT-LLM %s is newer than the source that this plugin was built against (%s)",
                release,
                DESCRIBED,
            )
        context.logger.warning("rollout 'trtllm' has not been tried on the real TensorRT-LLM yet")
        port = port_for(self.config.port, context.rank, self.engine)
        log = log_path("trtllm", context)
        server = OwnServer(
            server_command(self.config, context, host=LOOPBACK, port=port),
            port=port,
            log=log,
            environment=variables(self.config, context, token),
            failures=FAILURES,
            config=self.config,
        )
        context.logger.info("TensorRT-LLM %s starts; it prints to %s", server.url, log)
        return server

    async def join(self, connection: ServerConnection) -> None:
        await join(connection, self.config, self.context)

    def figures_from(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        return self._figures.since(totals)
