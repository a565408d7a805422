"""LeftOut: finds content that a chat template omits. It renders one row of each form with marks in place of the texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import attrs

from dovetail.errors import DataError
from dovetail.interfaces import Tokenizer
from dovetail_datasets.example_rows import ASSISTANT
from dovetail_datasets.example_texts import AnswerText, TrainedConversation
from dovetail_datasets.message_form import SENTINEL, THOUGHTS, message_form
from dovetail_datasets.tokenizer import special_texts

Render = Callable[[TrainedConversation], tuple[Tokenizer, AnswerText]]
"""A function that returns the rendered text of a conversation, and the tokenizer whose template rendered it."""
_CLOSE = "</think>"
_THOUGHTS = "thoughts "
_INLINE = f"{_THOUGHTS}in <think>…{_CLOSE}"
_CALLS = "calls in 'tool_calls'"
_END = "end of turn"
_NOTE = "the chat template leaves out {} {}"
_NO_END = "the trained tokens contain no end of a turn {}: the model does not learn to stop there"
_TOOLS = "functions in 'tools'"


@attrs.define
class Tally:
    """For each part of rows that the chat template leaves out: the number of rows with this part (`rows`), and the first of them."""

    total: int = 0
    """Number of rows that were checked."""
    rows: Counter[str] = attrs.field(factory=Counter)
    first: dict[str, str] = attrs.field(factory=dict)

    def add(self, found: Iterable[str], where: str) -> None:
        """Count a row and the parts of it that are left out; `where` names the row."""
        self.total += 1
        for what in sorted(found):
            self.rows[what] += 1
            self.first.setdefault(what, where)

    def merge(self, other: Tally) -> None:
        """Add the counts of later rows."""
        self.total += other.total
        self.rows += other.rows
        self.first = other.first | self.first

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each part that is left out, with the number of rows and the first row; empty if no part is left out."""
        notes = []
        for what, number in self.rows.items():
            where = f"in {number:,} of {self.total:,} rows (the first: {self.first[what]})"
            notes.append(_NO_END.format(where) if what == _END else _NOTE.format(what, where))
        return tuple(notes)


class LeftOut:
    """Detects parts of rows that the rendered text does not contain.

    Templates may trim, escape or translate a row's text, so the text itself is not searched for. Instead, one row is rendered for
    all rows with the same roles and fields of messages: a copy that has distinct marks in place of contents, reasoning, calls and function
    names. In trained turns, the marks must be in the trained part, followed by an end of turn. Reasoning of other turns may be left out, as
    many templates do by design.

    Args:
        render: a function that renders a conversation.
        own_tools: whether the tools come from the rows, and thus have to be in the text.
    """

    def __init__(self, render: Render, *, own_tools: bool = True) -> None:
        self._render, self._own_tools = render, own_tools
        self._kinds: dict[Hashable, frozenset[str]] = {}
        self.tally = Tally()
        """Counts of the content left out of the rows so far."""

    def of(self, conversations: Sequence[TrainedConversation], where: str) -> frozenset[str]:
        """Return the parts of a row that are left out, to add to `tally`.

        Args:
            conversations: one conversation for each answer of the row.
            where: the row's file and number, for messages.

        Raises:
            DataError: the row has tools, and the chat template does not render them.
        """
        key = tuple(map(_kind, conversations))
        if (found := self._kinds.get(key)) is None:
            found = frozenset(what for each in conversations for what in self._check(each))
            if _TOOLS in found:
                raise DataError(
                    f"{where}: the row has the column 'tools', but the chat template does not render its functions",
                    hint="set model.chat_template to a template that renders tools, or remove the column",
                )
            self._kinds[key] = found
        return found

    def _check(self, conversation: TrainedConversation) -> Iterator[str]:
        numbers = count()
        marked = [_marked(message, numbers) for message in conversation.messages]
        tools, names = conversation.tools, list[str]()
        if tools and self._own_tools:
            tools = [_named(tool, numbers, names) for tool in tools]
        copy = attrs.evolve(conversation, messages=[turn for turn, _ in marked], tools=tools)
        try:
            tokenizer, parts = self._render(copy)
        except Exception:  # noqa: BLE001 - a template raises what it likes, and takes the row itself
            return
        text = "".join(parts)
        if any(name not in text for name in names):
            yield _TOOLS
        trained = parts[1::2]
        for place, (turn, marks) in enumerate(marked):
            if place not in conversation.trained:
                yield from (
                    what
                    for what, mark in marks
                    if mark not in text and not what.startswith(_THOUGHTS)
                )
                continue
            missing = [what for what, mark in marks if not any(mark in part for part in trained)]
            yield from (f"{what} of turns that are trained on" for what in missing)
            if marks and not missing and not _ended(tokenizer, turn, marks, trained, tools):
                yield _END


def _kind(conversation: TrainedConversation) -> Hashable:
    """Return a key that is equal for conversations which a template treats alike, so that only one of them is rendered.

    The key holds the forms of the conversation's messages, and whether the conversation has tools. A form is the role, the type of the
    content, and whether a user's message follows later; for an assistant's message also the form of its reasoning, its number of calls
    up to 2, whether it is trained on, and whether it is the last message.
    """
    shapes, asked_later, last = set[Hashable](), False, len(conversation.messages) - 1
    for place in range(last, -1, -1):
        message = conversation.messages[place]
        role, content = message["role"], message.get("content")
        given = type(content).__name__ if content else ""
        shape: tuple[Hashable, ...] = (role, given, asked_later)
        if role == ASSISTANT:
            thought = next((field for field in THOUGHTS if message.get(field)), None)
            inline = isinstance(content, str) and _CLOSE in content
            calls, trained = len(message.get("tool_calls", ())), place in conversation.trained
            shape += thought, inline, min(calls, 2), trained, place == last
        shapes.add(shape)
        asked_later = asked_later or role == "user"
    return frozenset(shapes), bool(conversation.tools)


def _marked(
    message: Mapping[str, Any], numbers: Iterator[int]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return a copy of a message with marks in place of its texts, and, for each mark, a pair: a description of the text, and the mark.

    Args:
        message: the message.
        numbers: yields a new integer for each mark, which makes the mark unique.
    """
    marks: list[tuple[str, str]] = []

    def mark(what: str) -> str:
        marks.append((what, _mark(numbers)))
        return marks[-1][1]

    made, role, content = dict(message), message["role"], message.get("content")
    texts = f"texts of the role {role!r}"
    for field in THOUGHTS if role == ASSISTANT else ():
        if isinstance(message.get(field), str) and message[field].strip():
            made[field] = mark(f"{_THOUGHTS}in {field!r}")
    if isinstance(content, str) and content.strip():
        thinks = role == ASSISTANT and _CLOSE in content
        made["content"] = f"<think>\n{mark(_INLINE)}\n{_CLOSE}\n\n" if thinks else ""
        if content.rpartition(_CLOSE)[2].strip() or not thinks:
            made["content"] += mark(texts)
    elif isinstance(content, list):
        made["content"] = [
            {**part, "text": mark(texts)} if isinstance(part, Mapping) and "text" in part else part
            for part in content
        ]
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_marked_call(call, lambda: mark(_CALLS)) for call in calls]
    return made, marks


def _mark(numbers: Iterator[int]) -> str:
    return f"{SENTINEL}{next(numbers)}Z"


def _marked_call(call: Mapping[str, Any], mark: Callable[[], str]) -> dict[str, Any]:
    function = {**call.get("function", call), "name": mark()}
    if arguments := function.get("arguments"):
        marked = {mark(): mark()}
        function["arguments"] = json.dumps(marked) if isinstance(arguments, str) else marked
    return {**call, "function": function} if "function" in call else function


def _named(tool: Mapping[str, Any], numbers: Iterator[int], names: list[str]) -> dict[str, Any]:
    """Return a copy of a function's description with a mark in place of its name; the mark is appended to `names`."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": _named(function, numbers, names)}
    if "name" not in tool:
        return dict(tool)
    names.append(_mark(numbers))
    return {**tool, "name": names[-1]}


def _ended(
    tokenizer: Tokenizer,
    turn: Mapping[str, Any],
    marks: Sequence[tuple[str, str]],
    trained: Sequence[str],
    tools: Any,
) -> bool:
    """Return whether the trained text of a turn includes an end from which the model can learn to stop.

    An end is a special token, the text that the template writes after the last turn, or, after a turn without calls, any other text.

    Args:
        tokenizer: the tokenizer whose template rendered the text.
        turn: the turn, with marks in place of its texts.
        marks: the turn's marks, each preceded by a description.
        trained: the trained parts of the conversation's text.
        tools: the functions of the conversation.
    """
    last = marks[-1][1]
    part = next(part for part in trained if last in part).rstrip()
    tail = (message_form(tokenizer, tools).tail or "").strip()
    if part.endswith(special_texts(tokenizer)) or (tail and part.endswith(tail)):
        return True
    return not turn.get("tool_calls") and bool(part.rpartition(last)[2])
