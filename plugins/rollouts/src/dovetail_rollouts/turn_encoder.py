"""TurnEncoder: the tokens that a chat template puts between a turn of the policy and its next one.

A turn's tokens stay as they were produced. To get the tokens that follow, the template renders a conversation in which a sentinel
replaces the turn: prompt, sentinel and new messages. The text after the sentinel, from the end of its turn on, is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

from dovetail.interfaces import (
    Completion,
    FinishReason,
    Message,
    MessageCall,
    SamplingParams,
    Tokenizer,
)
from dovetail_datasets import SENTINEL, TextEncoder, message_form, unmarked

_ARGUMENTS = {"value": SENTINEL}
_MARK = "\n[…]\n"
"""The text that stands in a shortened message for the part that was left out; see `TurnEncoder.shortened`."""
_BYTES = 4
"""Maximum bytes of a character. A token has at least one byte, so a character has at most four tokens."""
_WINDOW = 32
"""Number of characters to encode at each end of a long text, per token of the limit; an average token is much shorter."""
_BROKEN = "\ufffd"


class TurnEncoder:
    """Encodes the text between two turns of the policy.

    Args:
        tokenizer: a tokenizer with a chat template.
        tools: functions that the template describes in the prompt.
        control_tokens: `data.control_tokens`; see `TextEncoder`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        control_tokens: Literal["text", "allow"] = "text",
    ) -> None:
        self._tokenizer, self._text = tokenizer, TextEncoder(tokenizer, control_tokens)
        self._tools = list(tools) or None
        self._special = frozenset(map(int, tokenizer.all_special_ids))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TurnEncoder:
        """Return an encoder for prompts in which the template describes these functions."""
        other = copy(self)
        other._tools = list(tools) or None  # noqa: SLF001 - of its own class
        return other

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Render a conversation as text for `encode`.

        If a message's text contains the text of a control token, such as `<|im_end|>`, the rendered text has markers around it. By
        these markers `encode` tells it from the template's own control tokens; see `TextEncoder`.

        Args:
            messages: the conversation.
            generate: whether to add the beginning of the assistant's next turn.
        """
        (text,) = self._text.texts([(messages, self._tools)], generate=generate)
        return text

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text; special tokens in it are encoded as such, unless `render` put markers around them."""
        return self._text.ids([text])[0]

    def encode_given(self, text: str, role: str) -> list[int]:
        """Return the tokens of the text of a message; whether control tokens that the text spells are encoded as such depends on `role`.

        `TextEncoder` describes the rule.
        """
        return self.encode(self._text.given(text, role))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def is_special(self, token: int) -> bool:
        """Return whether a token is one of the tokenizer's special tokens."""
        return token in self._special

    def after(
        self,
        prompt: Sequence[Message],
        messages: Sequence[Message],
        *,
        calls: Sequence[MessageCall] = (),
        ended_by: int | None,
    ) -> list[int]:
        """Return the tokens between a turn and the policy's next turn.

        Args:
            prompt: messages before the turn; the messages of the prompt suffice.
            messages: the messages after the turn.
            calls: tool calls of the turn.
            ended_by: the token with which the policy ended the turn. None if it did not end the turn; the result then begins
                with the token that ends a turn.

        Raises:
            ValueError: the template leaves the turn out.
            Exception: an error of the chat template.
        """
        turn = self.sentinel_turn(calls)
        tail = self.encode(_after_sentinel(self.render([*prompt, turn, *messages], generate=True)))
        alone = self.encode(_after_sentinel(self.render([*prompt, turn], generate=False)))
        end = self._end_of_turn(tail, alone, calls=bool(calls))
        if ended_by is None:
            return tail[end:]
        # The token with which the policy ended its turn is not repeated. In some templates (GLM, Gemma) the next message begins with it.
        if ended_by in tail[end : end + 2]:
            return tail[tail.index(ended_by, end) + 1 :]
        # Otherwise the template's own end token is skipped, if special tokens end both this turn and the last turn of a conversation
        # (in harmony two different tokens).
        last = end < len(alone) and tail[end] in self._special and alone[end] in self._special
        return tail[end + last :]

    def _end_of_turn(self, tail: Sequence[int], alone: Sequence[int], *, calls: bool) -> int:
        """Return the index of the token that ends the turn, in the tokens after the sentinel.

        The common prefix of both token lists contains the end of the turn. A call's own syntax stands before the end and may have
        special tokens, so the last special token of the prefix ends the turn. Without special tokens, a turn with calls ends
        after the prefix, and any other turn before it.

        Args:
            tail: the tokens after the sentinel, if further messages follow the turn.
            alone: the tokens after the sentinel, if the turn is the last message.
            calls: whether the turn has tool calls.
        """
        common = _common(tail, alone)
        ends = [i for i in range(common) if tail[i] in self._special]
        if ends:
            return ends[-1]
        return common if calls else 0

    def sentinel_turn(self, calls: Sequence[MessageCall] = ()) -> dict[str, Any]:
        """Return an assistant's message to render in place of a turn: it has as many calls as `calls`, and its last text is `SENTINEL`."""
        if not calls:
            return {"role": "assistant", "content": SENTINEL}
        named = [{**c, "function": {**c["function"], "arguments": _ARGUMENTS}} for c in calls]
        return self.produced_turn({"content": ""}, named)

    def produced_turn(self, message: Message, calls: Sequence[MessageCall] = ()) -> dict[str, Any]:
        """Return an assistant's message in the form that the chat template renders.

        Args:
            message: the turn, with `content` and optional `reasoning_content`. If the template reads no field for reasoning, the
                reasoning is put in `<think>` tags before the content.
            calls: tool calls of the turn, with their arguments by name.
        """
        turn = {**message, "role": "assistant"}
        thought = turn.pop("reasoning_content", None)
        if thought and (fields := message_form(self._tokenizer, self._tools).thought_fields):
            turn[fields[0]] = thought
        elif thought:
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
        return {**turn, "tool_calls": list(calls)} if calls else turn

    def shortened(self, message: Message, limit: int, side: str) -> Message:
        """Return a message whose texts are shortened to a limit of tokens each.

        Args:
            message: a message whose content is text, or a list of parts.
            limit: the largest number of tokens of a text.
            side: the part of a longer text that is left out: `left`, `middle` or `right`.
        """
        content, how = message.get("content"), (limit, side, str(message.get("role")))
        if isinstance(content, str):
            return {**message, "content": self._cut(content, *how)}
        if isinstance(content, Iterable):
            parts = [
                {**part, "text": self._cut(part["text"], *how)} if "text" in part else part
                for part in content
            ]
            return {**message, "content": parts}
        return message

    def _cut(self, text: str, limit: int, side: str, role: str) -> str:
        if len(text) <= limit // _BYTES:
            return text
        # Only the ends are encoded, since a text may have megabytes.
        window = limit * _WINDOW
        first, last = (self.encode_given(end, role) for end in (text[:window], text[-window:]))
        if len(text) <= window and len(first) <= limit:
            return text
        left = max(limit - len(self.encode(_MARK)), 0)
        kept = {"left": 0, "middle": (left + 1) // 2, "right": left}[side]
        head, end = first[:kept], last[len(last) - (left - kept) :]
        # A character that the cut splits decodes to U+FFFD.
        return f"{self.decode(head).rstrip(_BROKEN)}{_MARK}{self.decode(end).lstrip(_BROKEN)}"


def ended_by(turn: Completion, sampling: SamplingParams, encoder: TurnEncoder) -> int | None:
    """Return the token with which the policy ended a turn; None if a limit or a stop string ended the turn."""
    ids_T = turn.response_ids
    if turn.finish_reason is not FinishReason.STOP or not len(ids_T):
        return None
    last = int(ids_T[-1])
    return last if last in sampling.stop_token_ids or encoder.is_special(last) else None


def squeezed(text: str) -> str:
    """Return a text without white space, to compare renderings."""
    return "".join(text.split())


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    both = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in both if a != b), min(len(first), len(second)))


def _after_sentinel(text: str) -> str:
    _, found, tail = text.rpartition(SENTINEL)
    if not found:
        raise ValueError("the chat template leaves out an assistant's message")
    return tail


class RenderedHistory:
    """Compares the text of an episode, which only grows, with the text of a server that renders all messages again at each turn.

    Args:
        encoder: the encoder of the run's chat template.
        messages: the messages of the prompt.
    """

    def __init__(self, encoder: TurnEncoder, messages: Sequence[Message]) -> None:
        self._encoder, self._messages = encoder, list(messages)
        self._served: str | None = None
        """The text of the conversation up to the beginning of the latest turn; every turn ends as the template ends it."""
        self._turn: str | None = None
        """The text of the policy's latest turn, with texts that continued the turn; None if there is no turn."""

    def copy(self) -> RenderedHistory:
        """Return a copy that continues independently."""
        copied = RenderedHistory(self._encoder, self._messages)
        copied._served, copied._turn = self._served, self._turn
        return copied

    def produced(self, text: str) -> None:
        """Add text to the policy's latest turn."""
        self._turn = (self._turn or "") + text

    def observed(
        self,
        messages: Sequence[Message],
        calls: Sequence[MessageCall],
        produced: Message | None,
        appended: str,
    ) -> str | None:
        """Append messages that the policy sees after its turn.

        Args:
            messages: the messages that the policy sees.
            calls: the tool calls of the turn.
            produced: the turn as a message without its calls; by default the turn's whole text, including calls, is the content.
            appended: the text between the turn and the next turn, including the end of the turn.

        Returns:
            The whole conversation, rendered anew, if it differs from the text that the policy saw, apart from white space; else None.

        Raises:
            Exception: an error of the chat template.
        """
        if self._served is None:
            self._served = unmarked(self._encoder.render(self._messages, generate=True))
        if self._turn is not None:
            turn = {"content": self._turn} if produced is None else produced
            self._messages.append(
                self._encoder.produced_turn(turn, () if produced is None else calls)
            )
        self._messages += messages
        served = self._served + (self._turn or "") + appended
        rendered = self._encoder.render(self._messages, generate=True)
        reads = unmarked(rendered)
        same, self._turn = squeezed(reads) == squeezed(served), None
        self._served = served if same else reads
        return None if same else rendered
