"""The tools of a run, as an agent loop uses them: a call's tool is found by name, and its arguments are checked by schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Any

from dovetail.errors import PluginBrokenError, ToolError, nearest
from dovetail.interfaces import (
    EpisodeInfo,
    Tool,
    ToolCall,
    ToolResult,
    ToolSchema,
    contained,
    problem_of,
)

_SHOWN_PROBLEMS = 5


class ToolSet:
    """Started tools with unique function names.

    Args:
        tools: the tools, in the order in which the policy sees them.

    Raises:
        PluginBrokenError: a schema is wrong, or two functions share a name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tuple(tools)
        self.schemas: tuple[ToolSchema, ...] = ()
        """The schemas of all functions, in the order of the tools."""
        self._functions: dict[str, tuple[Tool, Any]] = {}
        for tool in self.tools:
            schemas = tuple(tool.schemas())
            for schema in schemas:
                self._add(tool, schema)
            self.schemas += schemas

    @asynccontextmanager
    async def open(self, episode: EpisodeInfo) -> AsyncIterator[OpenTools]:
        """Open every tool for an episode, and release the tools when the episode ends."""
        async with AsyncExitStack() as stack:
            states: dict[Tool, Any] = {}
            for tool in self.tools:
                states[tool] = await contained(tool.open(episode))
                stack.push_async_callback(_release, tool, states[tool])
            yield OpenTools(self._functions, states)

    def _add(self, tool: Tool, schema: object) -> None:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import SchemaError
        from referencing import Registry

        function = schema.get("function") if isinstance(schema, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise PluginBrokenError(
                f"tool {tool.name!r} has the schema {_cut(schema)}, which names no function",
                hint='write {"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}',
            )
        title = f"function {name!r} of tool {tool.name!r}"
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            place = ".".join(map(str, error.absolute_path))
            raise PluginBrokenError(
                f"the parameters of {title} are not a JSON schema: {_cut(error.message)}",
                hint=f"correct `parameters{f'.{place}' if place else ''}`",
            ) from error
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
            raise PluginBrokenError(
                f"the parameters of {title} are {_cut(parameters)}; expected the schema of an object",
                hint='write {"type": "object", "properties": {…}, "required": […]}',
            )
        if name in self._functions:
            other = self._functions[name][0].name
            raise PluginBrokenError(
                f"tools {other!r} and {tool.name!r} both have a function {name!r}",
                hint="rename one of the functions, or leave one of the tools out",
            )
        # With the default registry, the validator would fetch the targets of `$ref` from the network.
        self._functions[name] = tool, _validator()(parameters, registry=Registry())


def _validator() -> Any:
    """Return a validator of draft 2020-12 in which 3.0 is no integer, since a function that takes an int would get a float."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def is_whole(_: object, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_whole)
    return extend(Draft202012Validator, type_checker=checker)


class OpenTools:
    """The opened tools of one episode, as `ToolSet.open` yields them."""

    def __init__(
        self, functions: Mapping[str, tuple[Tool, Any]], states: Mapping[Tool, Any]
    ) -> None:
        self._functions = functions
        self._states = states

    async def call(self, call: ToolCall) -> ToolResult:
        """Check a call's arguments against the function's schema and run the call.

        Raises:
            ToolError: the function is unknown, the arguments violate its schema, or the tool raised a ToolError. The message is for the
                policy.
            TypeError: the tool returned no ToolResult.
        """
        if call.name not in self._functions:
            near = nearest(call.name[:100], self._functions)
            known = ", ".join(sorted(self._functions)) or "none"
            raise ToolError(
                f"the function {_cut(call.name, 40)!r} does not exist; expected one of: {known}"
                + (f"; did you mean {near!r}?" if near else "")
            )
        tool, validator = self._functions[call.name]
        if problem := problem_of(call.arguments):
            raise ToolError(f"the arguments of {call.name!r} {problem}")
        try:
            wrong = list(islice(validator.iter_errors(dict(call.arguments)), _SHOWN_PROBLEMS))
        except ArithmeticError as error:  # such as a number that is too large for the check
            raise ToolError(f"wrong arguments of {call.name!r}: {error}") from error
        if wrong:
            said = "; ".join(sorted(map(_problem, wrong)))
            raise ToolError(f"wrong arguments of {call.name!r}: {said}")
        result: object = await contained(tool.call(self._states[tool], call.name, call.arguments))
        if not isinstance(result, ToolResult):
            raise TypeError(
                f"tool {tool.name!r} returned {_cut(result)} from {call.name!r}; expected a ToolResult"
            )
        return result


async def _release(tool: Tool, state: Any) -> None:
    await contained(tool.release(state))


def _problem(error: Any) -> str:
    """Return the message of a schema error in a call's arguments, after the path of the wrong argument."""
    path = ".".join(map(str, error.absolute_path))
    return f"{path}: {_cut(error.message)}" if path else _cut(error.message)


def _cut(value: object, length: int = 200) -> str:
    """Return a value as text for a message, cut to `length` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else f"{text[:length]}…"
