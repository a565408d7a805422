"""What a vLLM server serves for Dovetail: an ASGI middleware, named on vLLM's command line.

`--middleware dovetail_rollout_vllm.server_app.VllmRoutes` adds paths below `/dovetail/v1/` to vLLM's own. They drive the
engine that the server runs, and answer only those who know the token in the variable `DOVETAIL_VLLM_TOKEN`, where the
server was started with one.
"""

from __future__ import annotations

from dovetail_rollout_vllm.environment import TOKEN_VARIABLE
from dovetail_rollout_vllm.server_host import ServerHost
from dovetail_serving import Host, Routes, Scope


class VllmRoutes(Routes):
    """Dovetail's routes over the engine of vLLM's application."""

    token_variable = TOKEN_VARIABLE

    def make_host(self, scope: Scope) -> Host:
        state = scope["app"].state
        return ServerHost(state.engine_client, state.args)
