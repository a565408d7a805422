"""ToolAgent: the policy calls tools and sees their results, until a turn calls no tool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeVar

from dovetail.errors import ToolError
from dovetail.interfaces import (
    AgentLoop,
    EpisodeError,
    EpisodeInfo,
    FailureKind,
    MessageCall,
    ParsedTurn,
    PluginConfig,
    PluginContext,
    Session,
    Tool,
    ToolCall,
    ToolParser,
    ToolResult,
    Transition,
    error_text,
    problem_of,
)
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_agents.config import ToolAgentConfig
from dovetail_agents.tool_set import OpenTools, ToolSet

Result = TypeVar("Result")

_HERMES = PluginSection(name="hermes")
UNREADABLE = "unreadable_call"
"""Function name under which the trajectory records a call that the parser can't read."""
_BACKOFF_SECONDS = 0.25


class ToolAgent(AgentLoop):
    """Agent loop that runs the calls of each turn concurrently, and shows their results to the policy in the order of the calls.

    An episode ends with a turn without calls, when a tool ends the episode, or at a limit. ToolErrors, unreadable calls, and calls beyond
    `max_calls_per_turn` become observations `error: …`. A tool's reward is added to the turn with the call.

    Metrics are means over episodes: `episode/tool_calls/NAME` and `episode/tool_seconds/NAME` of each function, failed attempts
    included in the seconds; `episode/tool_errors`, ToolErrors and unreadable calls; `episode/unreadable_calls`, unreadable calls alone;
    `episode/skipped_calls`, calls beyond `max_calls_per_turn`.

    Example:
        rollout:
          agent_loop:
            name: tool_agent
            tools: [calculator, {path: my_tools.py, attribute: look_up}]
            parser: hermes
    """

    name = "tool_agent"
    api = ">=1.3,<2"
    Config = ToolAgentConfig
    transitions: ClassVar[frozenset[Transition]] = frozenset({"tool"})

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        tools = {f"tools[{i}]": ("tool", section) for i, section in enumerate(config.tools)}
        return {**tools, "parser": ("tool_parser", config.parser or _HERMES)}

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._started: list[Tool] = []
        self._tools = ToolSet(())
        self._names: set[str] = set()
        self._parser: ToolParser
        self._places = asyncio.Semaphore(config.max_running_calls)

    def start(self) -> None:
        """Start the tools and the parser.

        Raises:
            PluginError: a tool or the parser can't be loaded, a schema is wrong, or two functions share a name.
        """
        parser: Any = make_plugin(
            ref_for("tool_parser", self.config.parser or _HERMES), self.context
        )
        self._parser = parser
        parser.start()
        for section in self.config.tools:
            tool: Any = make_plugin(ref_for("tool", section), self.context)
            self._started.append(tool)
            tool.start()
        self._tools = ToolSet(self._started)
        self._names = {schema["function"]["name"] for schema in self._tools.schemas}

    def close(self) -> None:
        while self._started:
            self._started.pop().close()

    def chat_tools(self) -> Sequence[Mapping[str, Any]]:
        return self._tools.schemas

    async def run(self, session: Session) -> None:
        info = EpisodeInfo(sample_id=session.sample_id, extra_info=session.prompt.extra_info or {})
        async with AsyncExitStack() as stack:
            try:
                tools = await stack.enter_async_context(self._tools.open(info))
            except EpisodeError:
                raise
            except Exception as error:
                raise EpisodeError(
                    FailureKind.TOOL, f"a tool can't be opened: {error_text(error)}"
                ) from error
            done = False
            while not done:
                turn = await session.generate()
                parsed = self._parser.parse(turn.text, self._tools.schemas)
                if not parsed.calls and not parsed.errors:
                    return
                done = await self._observe(session, tools, parsed)

    async def _observe(self, session: Session, tools: OpenTools, parsed: ParsedTurn) -> bool:
        """Run the calls of a turn and show their results; return whether a tool ends the episode."""
        most = self.config.max_calls_per_turn
        run = parsed.calls[:most]
        results = await _together([self._call(session, tools, call) for call in run])
        calls = [_message_call(call) for call in run]
        # An unreadable call becomes a call of its own, since templates show only results of calls.
        for number, error in enumerate(parsed.errors[: most - len(run)]):
            calls.append(
                _message_call(ToolCall(id=f"error_{number}", name=UNREADABLE, arguments={}))
            )
            results.append(ToolResult(content=f"error: {error}"))
            session.count("tool_errors")
        if parsed.errors:
            session.count("unreadable_calls", len(parsed.errors))
        left = len(parsed.calls) + len(parsed.errors) - len(calls)
        if left:
            session.count("skipped_calls", left)
            note = f"error: {left} more call(s) were not run; the limit is {most} per turn"
            results[-1] = ToolResult(
                content=_with_note(results[-1].content, note),
                reward=results[-1].reward,
                done=results[-1].done,
            )
        for result in results:
            if result.reward is not None:
                session.reward(result.reward)
        await session.observe(
            [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"],
                    "content": result.content,
                }
                for call, result in zip(calls, results, strict=True)
            ],
            calls,
            produced={"content": parsed.content, "reasoning_content": parsed.reasoning},
        )
        return any(result.done for result in results)

    async def _call(self, session: Session, tools: OpenTools, call: ToolCall) -> ToolResult:
        """Run one call, with retries. Raises EpisodeError if its tool fails."""
        if call.name in self._names:
            session.count(f"tool_calls/{call.name}")
        found = await self._once(session, tools, call)
        for attempt in range(self.config.retries):
            if isinstance(found, ToolResult):
                break
            await asyncio.sleep(_BACKOFF_SECONDS * 2**attempt)
            found = await self._once(session, tools, call)
        if isinstance(found, EpisodeError):
            raise found
        return found

    async def _once(
        self, session: Session, tools: OpenTools, call: ToolCall
    ) -> ToolResult | EpisodeError:
        """Run one attempt of a call; return the result for the policy, or the tool's failure."""
        limit = asyncio.timeout(self.config.call_seconds)
        failure: Exception | None = None
        try:
            async with self._places, limit:
                began = time.monotonic()
                try:
                    result = await tools.call(call)
                finally:
                    if call.name in self._names:
                        session.count(f"tool_seconds/{call.name}", time.monotonic() - began)
        except EpisodeError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool raises what it likes
            failure = error
        if limit.expired():  # also if the tool swallowed its cancellation
            what = f"took longer than {self.config.call_seconds:g} s, its limit (call_seconds), and was cancelled"
        elif failure is None:
            return result
        elif isinstance(failure, ToolError):
            session.count("tool_errors")
            return ToolResult(content=f"error: {failure.message}")
        else:
            what = f"raised {error_text(failure)}"
        failed = EpisodeError(FailureKind.TOOL, f"tool {call.name!r} {what}")
        failed.__cause__ = failure
        return failed


def _message_call(call: ToolCall) -> MessageCall:
    # Templates iterate over arguments, so arguments that can't be sent, stored or shown are left out.
    arguments = {} if problem_of(call.arguments) else dict(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _with_note(content: Any, note: str) -> Any:
    if isinstance(content, str):
        return f"{content}\n{note}"
    return [*content, {"type": "text", "text": note}]


async def _together(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await all coroutines concurrently and return their results; if one fails, or the wait is cancelled, cancel and await the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
