"""VllmServerBackend: a vLLM server over HTTP, started by the replica or by hand."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.interfaces import PluginContext
from dovetail.metrics import Metric
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.environment import TOKEN_VARIABLE
from dovetail_rollout_vllm.fused import Parts
from dovetail_rollout_vllm.server_metrics import server_metrics
from dovetail_rollout_vllm.server_start import join, start_server
from dovetail_serving import OwnServer, ServerBackend, ServerConnection


class VllmServerBackend(ServerBackend):
    """Backend of a replica on one vLLM server."""

    engine = "vLLM"
    token_variable = TOKEN_VARIABLE

    def __init__(self, config: VllmRolloutConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._metrics = server_metrics()

    def start_server(self, token: str) -> OwnServer:
        return start_server(self.config, self.context, token)

    async def join(self, connection: ServerConnection) -> None:
        await join(connection, self.config, self.context)

    def parts(self) -> Parts:
        """Return the names of the model's fused layers, each with the names of the checkpoint tensors that are fused."""
        return self._ask("describe")["parts"]

    def metrics_from(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        return self._metrics.since(totals)
