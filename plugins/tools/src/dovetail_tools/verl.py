"""Verl: tools written for verl, loaded from verl's YAML file, even if verl is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dovetail.errors import DovetailError, PluginBrokenError, PluginNeedsError
from dovetail.interfaces import EpisodeInfo, PluginContext, Tool, ToolResult, ToolSchema
from dovetail_tools.config import VerlConfig


class Verl(Tool):
    """Offers the policy every tool in a tools file of verl as a function; each episode has its own instance of each tool.

    In a row of the dataset, `extra_info.tools_kwargs[NAME]` has the arguments of the tool NAME: `create_kwargs` for its `create`,
    `execute_kwargs` for its `execute`. The second result of `execute` is the call's reward. `calc_reward` is not called: a reward
    function scores episodes.
    """

    name = "verl"
    api = ">=2.0,<3"
    Config = VerlConfig

    def __init__(self, config: VerlConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._tools: dict[str, Any] = {}
        self._schemas: tuple[ToolSchema, ...] = ()

    def start(self) -> None:
        """Read the tools file and construct its tools.

        Raises:
            PluginBrokenError: the file or a class is missing or fails, or a tool's type is not `native`.
        """
        file = Path(self.config.tools_config).expanduser()
        try:
            given = yaml.safe_load(file.read_text(encoding="utf-8"))
            entries = given["tools"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise PluginBrokenError(
                f"{file} is not a tools file of verl: {error!r}",
                hint="write `tools:`, a list whose entries have class_name, config and tool_schema",
            ) from error
        tools = [_tool(entry, file) for entry in entries]
        self._schemas = tuple(_plain(tool.get_openai_tool_schema()) for tool in tools)
        self._tools = {
            schema["function"]["name"]: tool
            for schema, tool in zip(self._schemas, tools, strict=True)
        }

    def schemas(self) -> Sequence[ToolSchema]:
        return self._schemas

    async def open(self, episode: EpisodeInfo) -> dict[str, tuple[str, Mapping[str, Any]]]:
        given: Mapping[str, Any] = episode.extra_info.get("tools_kwargs") or {}
        state: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for name, tool in self._tools.items():
            own = given.get(name) or {}
            create = own.get("create_kwargs") or {}
            # Some versions of verl pass these as keyword arguments, others as one `create_kwargs`.
            made = await _call(tool.create, str(uuid.uuid4()), {"create_kwargs": create, **create})
            state[name] = (
                made[0] if isinstance(made, tuple) else made,
                own.get("execute_kwargs") or {},
            )
        return state

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        instance, further = state[name]
        answer = await self._tools[name].execute(instance, dict(arguments), **further)
        response, reward, *_ = answer if isinstance(answer, tuple) else (answer, None)
        return ToolResult(content=_content(response), reward=reward)

    async def release(self, state: Any) -> None:
        for name, (instance, _) in state.items():
            await self._tools[name].release(instance)


def _tool(entry: Any, file: Path) -> Any:
    """Construct the verl tool that an entry of `tools` in the YAML file describes.

    Raises:
        PluginNeedsError: a module that the tool needs is not installed.
        PluginBrokenError: the entry is invalid, or the tool can't be constructed.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise PluginBrokenError(
            f"{file}: an entry of `tools` is {entry!r:.100}; expected a mapping with class_name"
        )
    title, settings = entry["class_name"], entry.get("config") or {}
    if settings.get("type", "native") != "native":
        raise PluginBrokenError(
            f"{file}: {title} is of type {settings['type']!r}; expected 'native'",
            hint="for MCP servers use the tool `mcp`",
        )
    module, _, attribute = title.rpartition(".")
    schema = entry.get("tool_schema")
    try:
        from verl.tools.schemas import OpenAIFunctionToolSchema

        cls = getattr(importlib.import_module(module), attribute)
        given = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        return cls(config=dict(settings), tool_schema=given)
    except Exception as error:
        raise _unmade(f"{file}: {title}", error) from error


def _unmade(which: str, error: Exception) -> DovetailError:
    """Return the error for a tool that can't be constructed, with a hint on what to install; `which` names the tool and its file."""
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing == "verl":
        return PluginNeedsError(
            f"{which} needs the module 'verl', which is not installed",
            hint="pip install 'dovetail-tools[verl]', which has stand-ins for the parts of verl that tools import",
        )
    verl = importlib.util.find_spec("verl")
    place = None if verl is None else verl.origin
    if missing and "dovetail_verl_shim" not in str(place) and "verl" not in sys.modules:
        return PluginNeedsError(
            f"{which} can't be loaded: the verl at {place} needs the module {missing!r}, which is not installed",
            hint="install verl's dependencies; or remove that verl from PYTHONPATH, and pip install 'dovetail-tools[verl]'",
        )
    hint = None
    if missing:
        hint = f"add the folder that contains {missing!r} to PYTHONPATH"
        if missing.startswith("verl"):
            hint = "this tool needs more of verl than dovetail-verl-shim has: install verl"
    return PluginBrokenError(
        f"{which} can't be created: {type(error).__name__}: {error}", hint=hint
    )


async def _call(method: Callable[..., Any], first: str, keywords: Mapping[str, Any]) -> Any:
    """Await `method(first, **keywords)`, without the keywords that the method does not take."""
    parameters = inspect.signature(method).parameters
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        keywords = {key: value for key, value in keywords.items() if key in parameters}
    return await method(first, **keywords)


def _plain(schema: Any) -> ToolSchema:
    """Return a schema as plain containers, converted from a pydantic model if necessary."""
    if isinstance(schema, Mapping):
        return schema
    return schema.model_dump(exclude_unset=True, exclude_none=True)


def _content(response: Any) -> Any:
    """Return the content of a verl tool's response: a text, or a list of image and text parts if the response has images."""
    if isinstance(response, str):
        return response
    fields = response if isinstance(response, Mapping) else response.model_dump(exclude_none=True)
    text, images = fields.get("text") or "", fields.get("image") or ()
    if not images:
        return text
    return [{"type": "image", "image": one} for one in images] + [{"type": "text", "text": text}]
