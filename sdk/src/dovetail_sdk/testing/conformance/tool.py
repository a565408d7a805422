"""The suites of tools and of parsers of tool calls."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from dovetail.errors import ToolError
from dovetail.interfaces import (
    EpisodeInfo,
    ParsedTurn,
    Tool,
    ToolCall,
    ToolParser,
    ToolResult,
    ToolSchema,
)
from dovetail_agents import ToolSet
from dovetail_sdk.testing.conformance.plugin import PluginConformance

_ODD_VALUES: tuple[Any, ...] = (
    *("", "\x00", "\ud800", "x" * 100_000, "(" * 900, "∑ 字 🦊", "null"),
    *(None, True, -1, 0, 1.5, 10**30, 10**4000, math.inf, [], {}),
)
"""Unusual values that a policy may write in place of any argument; given them, a tool may raise nothing but ToolError."""


class ToolConformance(PluginConformance):
    """Conformance suite for tools: subclass it and set `plugin` and `calls`."""

    kind = "tool"
    plugin: ClassVar[type[Tool]]
    episode: ClassVar[EpisodeInfo] = EpisodeInfo(sample_id="sample-0")
    """The episode for which the tool is opened."""
    calls: ClassVar[tuple[tuple[str, Mapping[str, Any], str], ...]] = ()
    """Calls as function, arguments, and a text that the observation contains. Each call runs in a separate episode."""
    refused: ClassVar[tuple[tuple[str, Mapping[str, Any], str], ...]] = ()
    """Calls that become an error observation, each with a text that the observation contains."""
    hanging: ClassVar[tuple[str, Mapping[str, Any]] | None] = None
    """A call that runs for more than ten seconds unless it is cancelled."""

    def use(self, work: Callable[[ToolSet], Awaitable[Any]]) -> Any:
        """Start the tool, run `work` on the tool in an event loop, and close the tool."""

        async def run() -> Any:
            return await work(ToolSet([tool]))

        tool = self.make()
        try:
            tool.start()
            return asyncio.run(run())
        finally:
            tool.close()

    def called(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the result of one call in a new episode."""

        async def work(tools: ToolSet) -> ToolResult:
            async with tools.open(self.episode) as opened:
                return await opened.call(ToolCall(id="call_0", name=name, arguments=arguments))

        return self.use(work)

    def needs_calls(self) -> None:
        """Skip the test if the suite names no calls."""
        if not self.calls:
            pytest.skip("the suite has no calls: set `calls` in a suite")

    def test_its_schemas_are_valid_and_stay_the_same(self) -> None:
        async def work(tools: ToolSet) -> None:
            [tool] = tools.tools
            assert tools.schemas, "the tool has no function"
            assert json.loads(json.dumps(list(tools.schemas))) == list(tool.schemas())

        self.use(work)

    def test_its_calls_give_what_they_should(self) -> None:
        self.needs_calls()
        for name, arguments, expected in self.calls:
            content = self.called(name, arguments).content
            assert expected in (content if isinstance(content, str) else json.dumps(content))

    def test_what_it_refuses_the_policy_is_told(self) -> None:
        if not self.refused:
            pytest.skip("the suite has no failing calls: set `refused` in a suite")
        for name, arguments, expected in self.refused:
            with pytest.raises(ToolError) as caught:
                self.called(name, arguments)
            assert expected in str(caught.value)

    def test_odd_arguments_are_answered_or_refused_and_fail_no_episode(self) -> None:
        self.needs_calls()

        async def work(tools: ToolSet) -> None:
            async with tools.open(self.episode) as opened:
                for name, arguments, _ in self.calls:
                    odd = [{**arguments, key: value} for key in arguments for value in _ODD_VALUES]
                    for given in ({}, {**arguments, "no_such_argument": 1}, *odd):
                        with suppress(ToolError):
                            await opened.call(ToolCall(id="call_0", name=name, arguments=given))

        self.use(work)

    def test_the_limit_of_its_own_on_a_call_is_above_zero_or_none(self) -> None:
        tool = self.make()
        longest = tool.longest_call(tool.config)
        assert longest is None or 0 < longest < math.inf

    def test_episodes_at_the_same_time_do_not_disturb_each_other(self) -> None:
        self.needs_calls()

        async def work(tools: ToolSet) -> None:
            async def episode(number: int) -> None:
                one = EpisodeInfo(sample_id=f"sample-{number}", extra_info=self.episode.extra_info)
                async with tools.open(one) as opened:
                    name, arguments, expected = self.calls[number % len(self.calls)]
                    call = ToolCall(id="call_0", name=name, arguments=arguments)
                    content = (await opened.call(call)).content
                    assert expected in (content if isinstance(content, str) else str(content))

            await asyncio.gather(*(episode(number) for number in range(8)))

        self.use(work)

    def test_a_hanging_call_ends_when_it_is_cancelled_and_the_tool_works_on(self) -> None:
        if self.hanging is None:
            pytest.skip("the suite has no hanging call: set `hanging` in a suite")
        name, arguments = self.hanging

        async def work(tools: ToolSet) -> None:
            async with tools.open(self.episode) as opened:
                call = ToolCall(id="call_0", name=name, arguments=arguments)
                # The call must end within 5 s after its cancellation; a call that can't be cancelled takes longer.
                async with asyncio.timeout(5):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(opened.call(call), 0.5)
            for name_, arguments_, expected in self.calls[:1]:
                async with tools.open(self.episode) as opened:
                    again = ToolCall(id="call_0", name=name_, arguments=arguments_)
                    assert expected in str((await opened.call(again)).content)

        self.use(work)


_ODD_TEXTS = ("", " ", "\n\n", "\x00", "∑ 字 🦊", "{", "}" * 50, "[" * 200, "<tool_call>", "null")


class ToolParserConformance(PluginConformance):
    """Conformance suite for tool parsers: subclass it and set `plugin` and `examples`."""

    kind = "tool_parser"
    plugin: ClassVar[type[ToolParser]]
    tools: ClassVar[Sequence[ToolSchema]] = ()
    """Schemas of the functions that the examples call."""
    examples: ClassVar[tuple[tuple[str, ParsedTurn], ...]] = ()
    """Examples: the text of a turn with calls, and the parsed turn."""

    def parse(self, text: str) -> ParsedTurn:
        """Parse the text of one turn with the parser under test."""
        return self.make().parse(text, self.tools)

    def test_examples_are_read_as_they_should(self) -> None:
        if not self.examples:
            pytest.skip("the suite has no examples: set `examples` in a suite")
        for text, expected in self.examples:
            assert self.parse(text) == expected

    def test_plain_text_is_content_and_no_call(self) -> None:
        text = "The answer is 4, since 2 + 2 = 4.\nDone."
        assert self.parse(text) == ParsedTurn(content=text)

    def test_odd_texts_and_cut_examples_raise_nothing_and_call_nothing_without_a_name(self) -> None:
        cut = [text[:end] for text, _ in self.examples for end in range(len(text))]
        for text in (*_ODD_TEXTS, *cut):
            turn = self.parse(text)
            assert isinstance(turn, ParsedTurn)
            assert all(call.name and isinstance(call.name, str) for call in turn.calls), text
            assert all(isinstance(call.arguments, Mapping) for call in turn.calls), text

    def test_a_call_that_was_cut_off_is_no_call_with_other_arguments(self) -> None:
        for text, whole in self.examples:
            known = [(call.name, dict(call.arguments)) for call in whole.calls]
            for end in range(len(text)):
                for call in self.parse(text[:end]).calls:
                    assert (call.name, dict(call.arguments)) in known, text[:end]

    def test_ids_of_calls_differ(self) -> None:
        for text, _ in self.examples:
            calls = self.parse(text).calls
            assert len({call.id for call in calls}) == len(calls)
