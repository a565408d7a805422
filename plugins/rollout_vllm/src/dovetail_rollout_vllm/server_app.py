"""VllmRoutes: an ASGI middleware that adds Dovetail's routes to a vLLM server.

vLLM's argument `--middleware dovetail_rollout_vllm.server_app.VllmRoutes` adds paths below `/dovetail/v1/`, which operate the
server's engine. If the server was started with the variable `DOVETAIL_VLLM_TOKEN`, requests must carry this token.
"""

from __future__ import annotations

from dovetail_rollout_vllm.environment import TOKEN_VARIABLE
from dovetail_rollout_vllm.server_host import ServerHost
from dovetail_serving import Host, Routes, Scope


class VllmRoutes(Routes):
    """Answers requests to Dovetail's HTTP paths, `/dovetail/v1/…`, in a vLLM server."""

    token_variable = TOKEN_VARIABLE

    def make_host(self, scope: Scope) -> Host:
        state = scope["app"].state
        return ServerHost(state.engine_client, state.args)
