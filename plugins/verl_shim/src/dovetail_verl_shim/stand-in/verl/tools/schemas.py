"""Schemas of tools, and of their responses."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Open(BaseModel):
    """Base class that keeps keys for which it declares no field, since JSON Schema has many more keys."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """The schema of a function's parameter."""


class OpenAIFunctionParametersSchema(_Open):
    """The schema of a function's parameters."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """The schema of a function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()


class OpenAIFunctionToolSchema(_Open):
    """The schema of a tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The response of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
