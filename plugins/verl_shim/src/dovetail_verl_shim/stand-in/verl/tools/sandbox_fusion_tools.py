"""SandboxFusionTool: runs code on a SandboxFusion server."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_GRACE = 10.0
"""Seconds that the server has to answer, in addition to the code's time limit."""


class _Remote:
    """Runs calls in a limited number of threads, with the interface of verl's pool of Ray actors: `pool.execute.remote(…)`."""

    def __init__(self, workers: int) -> None:
        self.execute = self
        self._free = asyncio.Semaphore(workers)

    async def remote(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function in a thread once one of the `workers` threads is free, and return its result."""
        async with self._free:
            return await asyncio.to_thread(function, *arguments, **named)


class SandboxFusionTool(BaseTool):  # type: ignore[misc]
    """Runs code on a SandboxFusion server. Config keys: `sandbox_fusion_url`, `num_workers`, `default_timeout` (seconds),
    `default_language`, `memory_limit_mb`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        self.sandbox_fusion_url = config.get("sandbox_fusion_url", "")
        if not self.sandbox_fusion_url.startswith(("http://", "https://")):
            raise ValueError(
                f"sandbox_fusion_url is {self.sandbox_fusion_url!r}; expected the server's address, such as http://127.0.0.1:8080/run_code"
            )
        self.execution_pool = _Remote(config.get("num_workers", 10))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run `parameters["code"]`; return a `ToolResponse` with what the code printed, and None for both reward and metrics."""
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        answer = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, str(parameters.get("code", "")), timeout, language
        )
        return answer, None, None

    def execute_code(
        self, instance_id: str, code: str, timeout: float = 30, language: str = "python"
    ) -> ToolResponse:
        """Return the code's output and errors, or the reason why it could not be run."""
        asked = {
            "code": code,
            "language": language,
            "run_timeout": timeout,
            "compile_timeout": timeout,
            "memory_limit_MB": self.memory_limit_mb,
        }
        request = urllib.request.Request(  # noqa: S310 - the user's own server
            self.sandbox_fusion_url,
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout + _GRACE) as reply:  # noqa: S310 - as above
                run = json.loads(reply.read()).get("run_result") or {}
        except (OSError, ValueError) as error:
            return ToolResponse(text=f"the sandbox failed: {error}")
        return ToolResponse(text=(run.get("stdout") or "") + (run.get("stderr") or ""))
