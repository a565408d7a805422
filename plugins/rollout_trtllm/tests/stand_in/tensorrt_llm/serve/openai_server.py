"""The stand-in's OpenAI paths: that they are there."""

from __future__ import annotations

import json
from typing import Any


class OpenAIServer:
    """An application over an engine."""

    def __init__(
        self,
        generator: Any,
        model: str,
        tool_parser: Any,
        server_role: Any,
        metadata_server_cfg: Any,
        disagg_cluster_config: Any = None,
        multimodal_server_config: Any = None,
        chat_template: str | None = None,
    ) -> None:
        self.model = model
        self.app = self._answer

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        known = scope["path"] in ("/v1/models", "/update_weights")
        body = json.dumps({"data": [{"id": self.model}]}).encode()
        await send({"type": "http.response.start", "status": 200 if known else 404, "headers": []})
        await send({"type": "http.response.body", "body": body})
