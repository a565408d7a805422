"""The few classes of verl that its tools are defined with, for machines without verl: same names and behaviour."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

Function = TypeVar("Function", bound=Callable[..., Any])

SCHEMAS = (
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
)
"""Classes that tools import from `verl.tools.schemas`."""


class _Open(BaseModel):
    """Keeps keys that are not named: JSON schema has many."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """A parameter."""


class OpenAIFunctionParametersSchema(_Open):
    """The parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()


class OpenAIFunctionToolSchema(_Open):
    """A tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool answers."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """Base of verl's tools."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "the tool has no schema"
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the tool's schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Make an instance for a trajectory."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call."""
        return ToolResponse(text=""), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance."""


def rollout_trace_op(function: Function) -> Function:
    """Trace nothing."""
    return function
