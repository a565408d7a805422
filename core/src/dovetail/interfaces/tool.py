"""Tool: what a policy can call during an episode, one function or several."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, TypeAlias

import attrs

from dovetail.errors import PluginBrokenError, ToolError
from dovetail.interfaces.contained import outcome_of
from dovetail.interfaces.plugin import Plugin, PluginConfig

ToolSchema: TypeAlias = Mapping[str, Any]
"""A function as chat templates and OpenAI's API describe it: `{"type": "function", "function": {"name", "description",
"parameters"}}`, where `parameters` is the JSON schema of an object."""
Content: TypeAlias = "str | Sequence[Mapping[str, Any]]"
"""Content of a message: text, or parts such as `{"type": "text", "text": …}` and `{"type": "image", "image": …}`."""


@attrs.frozen(kw_only=True)
class EpisodeInfo:
    """Which episode a tool is opened for."""

    sample_id: str
    """The sample that comes about; unique in the step."""
    extra_info: Mapping[str, Any] = attrs.field(factory=dict)
    """`extra_info` of the row of data; empty where the row has none."""


def _check_content(_: object, __: object, content: Any) -> None:
    parts = isinstance(content, (list, tuple)) and all(isinstance(one, Mapping) for one in content)
    if not (parts or isinstance(content, str)):
        raise TypeError(
            f"content of a ToolResult is {content!r:.200}; expected text or a list of content parts"
        )


def _check_reward(_: object, __: object, reward: float | None) -> None:
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"reward of a ToolResult is {reward}; expected a finite number")


@attrs.frozen(kw_only=True)
class ToolResult:
    """What a call returned.

    Raises:
        TypeError: the content is neither text nor a list of parts.
        ValueError: the reward is not finite.
    """

    content: Content = attrs.field(validator=_check_content)
    """The observation, in full: who calls the tool bounds its length."""
    reward: float | None = attrs.field(default=None, validator=_check_reward)
    """A reward for this call, where the tool gives one."""
    done: bool = False
    """Whether the episode ends here."""


class Tool(Plugin):
    """Functions that a policy can call. In a user's file a plain function does as well: its signature and docstring give the schema.

    One object serves all episodes at once, on one event loop: what belongs to an episode is in the state that `open` returns.
    """

    @classmethod
    def longest_call(cls, config: PluginConfig) -> float | None:
        """Return the seconds after which it ends a call itself, with an error that the policy is shown; None where it ends none."""
        return None

    @abstractmethod
    def schemas(self) -> Sequence[ToolSchema]:
        """Return a schema for each function. Called after `start`, and always the same."""

    async def open(self, episode: EpisodeInfo) -> Any:
        """Return the state of one episode, made before its first call; None where calls share none.

        Raises:
            ToolError: the episode can't have the tool. It then fails with the cause `tool`.
        """
        return None

    @abstractmethod
    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one call. Calls of a turn may run at the same time.

        The caller limits time and repeats what failed. When it cancels the call, whatever the call started must have ended
        before the cancellation is raised further.

        Args:
            state: what `open` returned.
            name: of the function.
            arguments: they hold to its schema.

        Raises:
            ToolError: its message becomes an observation. Any other exception is a failure of the episode, never a score.
        """

    async def release(self, state: Any) -> None:
        """Release the state of an episode, however it ended."""

    @classmethod
    def of_function(cls, function: Callable[..., Any], name: str) -> type[Tool]:
        """Return the class of a tool that calls a plain function, with what `get_json_schema` of transformers makes of it.

        A coroutine function is awaited. Any other runs in a thread, which a time limit can't end: it is left behind.

        Args:
            function: has a type for every parameter, and a docstring in Google's style that describes each. It returns text, a
                ToolResult, or a value that is shown as JSON.
            name: of the class.

        Raises:
            PluginBrokenError: a type or a description is missing.
        """
        return _function_tool(function, name)


class FunctionTool(Tool):
    """A tool of one function."""

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
            ):  # what the policy asked for has more digits than Python writes
                raise ToolError(f"the result of {name!r} can't be written: {error}") from error
            raise TypeError(
                f"function {name!r} returned {type(found).__name__}; expected text, a ToolResult or a JSON value"
            ) from error
        return ToolResult(content=text)


def _function_tool(function: Callable[..., Any], name: str) -> type[FunctionTool]:
    """Return the class that `Tool.of_function` describes.

    Raises:
        PluginBrokenError: the schema can't be made of the function's types and docstring.
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
    """Run a call in a thread of its own.

    The threads of `asyncio.to_thread` are few and joined at exit: a call that hangs would take one for ever and stop the exit.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        found = outcome_of(call)
        with contextlib.suppress(InvalidStateError):  # cancelled; nothing waits for it
            outcome.set_result(found)

    threading.Thread(target=run, name=f"tool-{name}", daemon=True).start()
    found, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return found
