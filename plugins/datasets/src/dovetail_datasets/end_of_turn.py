"""TurnEnds: the token that ends an assistant's turn, also where the chat template writes nothing after the turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from dovetail.interfaces import Tokenizer
from dovetail_datasets.message_form import SENTINEL, Tools, message_form
from dovetail_datasets.tokenizer import special_texts

Stops = Callable[[], Collection[int]]
"""A function that returns the tokens at which generation stops; empty where they are unknown."""
_QUESTION = {"role": "user", "content": "."}
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "tool", "arguments": {"value": SENTINEL}},
}
_TURNS: Mapping[bool, tuple[dict[str, Any], dict[str, Any]]] = {
    False: ({"role": "assistant", "content": SENTINEL}, _QUESTION),
    True: (
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "tool", "tool_call_id": _CALL["id"], "content": "."},
    ),
}
"""A turn with calls or without, and what follows it."""


class TurnEnds:
    """Adds the end-of-turn token to turns whose template writes nothing after them.

    The token added is the first token of the next message if generation stops at it, such as GLM's `<|user|>` and `<|observation|>`;
    otherwise, at the end of a text, the tokenizer's end-of-sequence token.

    Args:
        tokenizer: a tokenizer with a chat template.
        stops: see `Stops`; by default all special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Stops | None = None) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self.special = special_texts(tokenizer)
        self._found: dict[tuple[bool, bool], tuple[str, str, str] | None] = {}

    def ended(self, text: str, following: str | None, tools: Tools, *, calls: bool) -> str:
        """Return the text up to the end of its last turn, an assistant's, including the end-of-turn token.

        Args:
            text: the text of the messages up to the turn.
            following: the text including the messages after the turn; None if these are left out.
            tools: the functions of the conversation.
            calls: whether the turn has tool calls.
        """
        turn = text.rstrip()
        if turn.endswith(self.special):
            # What a template writes after an end of turn, no model generates.
            return turn
        key = bool(tools), calls
        if key not in self._found:
            self._found[key] = self._missing(tools, calls)
        if (end := self._found[key]) is None:
            return text
        blank, before, mark = end
        if following is None:
            return text.removesuffix(blank) + before + mark
        rest = following[len(turn) :].lstrip()
        if not rest.startswith(mark):
            return text
        return following[: len(following) - len(rest) + len(mark)]

    def _missing(self, tools: Tools, calls: bool) -> tuple[str, str, str] | None:
        """The token that ends such a turn, the blanks before it, and those that the template writes after a last turn."""
        form = message_form(self._tokenizer, tools)
        if form.tail is None or form.tail.strip():
            return None
        turn, following = _TURNS[calls]
        last = form.rendered(form.taken([_QUESTION, turn]))
        stem = last.rstrip()
        more = form.rendered(form.taken([_QUESTION, turn, following]))
        rest = more[len(stem) :] if more.startswith(stem) else ""
        begins = rest.lstrip()
        blank, before = last[len(stem) :], rest[: len(rest) - len(begins)]
        stops = self._stops() if self._stops is not None else ()
        marks = self._tokenizer.convert_ids_to_tokens(list(stops)) if stops else self.special
        for mark in filter(None, marks):
            if begins.startswith(mark):
                return blank, before, mark
        eos = getattr(self._tokenizer, "eos_token", None)
        return (blank, "", eos) if eos else None
