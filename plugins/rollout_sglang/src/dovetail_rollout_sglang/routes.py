"""SglangRoutes: adds paths below `/dovetail/v1/` to an SGLang server, and requires the token for SGLang's paths."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
from typing import Any

from dovetail_rollout_sglang.environment import TOKEN_VARIABLE
from dovetail_rollout_sglang.liveness import Liveness
from dovetail_serving import PREFIX, Host, Receive, Routes, Scope, Send

_OPEN = frozenset({"/health", "/metrics", "/model_info"})
"""SGLang's own paths that need no token: they change nothing and reveal nothing confidential."""


class SglangRoutes(Routes):
    """Answers requests to Dovetail's HTTP paths, `/dovetail/v1/…`, in an SGLang server.

    SGLang's own paths require the token too, since they can replace weights and unpickle requests.
    """

    token_variable = TOKEN_VARIABLE

    def make_host(self, scope: Scope) -> Host:
        from sglang.srt.entrypoints import http_server

        from dovetail_rollout_sglang.host import SglangHost

        return SglangHost(http_server.get_global_state().tokenizer_manager)

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self._liveness = Liveness()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._closed(scope):
            await _refuse(send, 401, "the access token is wrong or missing")
            return
        if scope["type"] == "http" and scope["path"] == "/health":
            lost = await asyncio.to_thread(self._liveness.lost)
            if lost is not None:
                sys.stderr.write(f"this server is unhealthy: {lost}\n")
                sys.stderr.flush()
                await _refuse(send, 503, lost)
                return
        await super().__call__(scope, receive, send)

    def _closed(self, scope: Scope) -> bool:
        if not self._token or scope["path"] in _OPEN or scope["path"].startswith(PREFIX):
            return False
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not hmac.compare_digest(given, f"Bearer {self._token}".encode())


async def _refuse(send: Send, status: int, why: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    body = json.dumps({"error": why}).encode()
    await send({"type": "http.response.body", "body": body, "more_body": False})
