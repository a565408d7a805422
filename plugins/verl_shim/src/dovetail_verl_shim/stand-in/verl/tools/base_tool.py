"""BaseTool, the base class of verl's tools."""

from __future__ import annotations

import uuid
from typing import Any

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"]


class BaseTool:
    """Stand-in for the base class of verl's tools."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "the tool has no schema"
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the tool's schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Make an instance of the tool for a trajectory; return the instance's id, a new one by default, and a first response."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call of the tool, and return its response, reward and metrics."""
        return ToolResponse(text=""), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of an instance of the tool."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance of the tool."""
