"""FunctionTool: makes a Python function a tool, with a schema from the function's types and docstring."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from dovetail.errors import PluginBrokenError, ToolError
from dovetail.interfaces import Tool, ToolResult, ToolSchema, outcome_of


class FunctionTool(Tool):
    """A tool that calls one Python function."""

    function: Callable[..., Any]
    schema: ToolSchema

    def schemas(self) -> Sequence[ToolSchema]:
        return (self.schema,)

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        known = self.schema["function"]["parameters"]["properties"]
        if unknown := ", ".join(map(repr, arguments.keys() - known.keys())):
            takes = ", ".join(known) or "none"
            raise ToolError(f"{name!r} has no argument {unknown:.100}; it takes: {takes}")
        call = partial(self.function, **arguments)
        found = await (
            call() if inspect.iscoroutinefunction(self.function) else _in_thread(call, name)
        )
        if isinstance(found, ToolResult):
            return found
        try:
            text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            if isinstance(
                found, int
            ):  # more digits than Python writes: the policy's fault, not the function's
                raise ToolError(
                    f"the result of {name!r} can't be written as text: {error}"
                ) from error
            raise TypeError(
                f"function {name!r} returned {type(found).__name__}; expected text, a ToolResult or a JSON value"
            ) from error
        return ToolResult(content=text)


def tool_of_function(function: Callable[..., Any], name: str) -> type[FunctionTool]:
    """Return the class of a tool that calls a plain function, with a schema from transformers' `get_json_schema`.

    A coroutine function is awaited. Any other function runs in a thread, which is abandoned at a time limit, since it can't be stopped.

    Args:
        function: a function with a type for every parameter, and a docstring in Google's style that describes each. It returns text,
            a ToolResult, or a value that is shown as JSON.
        name: the name of the class.

    Raises:
        PluginBrokenError: a type or a description is missing.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise PluginBrokenError(
            f"the function {name!r} can't be a tool: {error}",
            hint="give every parameter a type, and write a docstring with a summary and an `Args:` section that describes each",
        ) from error
    members = {"function": staticmethod(function), "schema": schema}
    return type(name, (FunctionTool,), members)


async def _in_thread(call: Callable[[], Any], name: str) -> Any:
    """Run a call in a new daemon thread, and return its result or raise its error; `name` is the tool's, for the thread's name.

    `asyncio.to_thread` has few threads and joins them at exit, so a call that hangs would occupy a thread forever and block the exit.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        found = outcome_of(call)
        with contextlib.suppress(InvalidStateError):  # the awaiting task was cancelled
            outcome.set_result(found)

    threading.Thread(target=run, name=f"tool-{name}", daemon=True).start()
    found, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return found
