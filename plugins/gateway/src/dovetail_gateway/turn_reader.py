"""TurnReader: parses a turn of the policy into the answer to a program's call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Self

import attrs

from dovetail.interfaces import (
    Completion,
    FinishReason,
    Message,
    MessageCall,
    ParsedTurn,
    PluginContext,
    ToolCall,
    ToolParser,
    Turn,
)
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_datasets import TextEncoder
from dovetail_gateway.dialects.call import ModelAnswer, ModelCall

HERMES = PluginSection(name="hermes")
_ID_LENGTH = 9
"""Number of characters of a tool call's id, as Mistral's templates require."""


@attrs.frozen
class TurnReader:
    """Parses turns of the policy into answers to a program's calls.

    Args:
        parser: the parser of the model's calls and reasoning.
        tokenizer: the tokenizer of the run.
        encoder: the encoder of the run's chat template.
    """

    parser: ToolParser
    tokenizer: Any
    encoder: TextEncoder

    @classmethod
    def started(cls, parser: PluginSection | None, context: PluginContext) -> Self:
        """Return a reader with a started parser; without a config of the parser, `hermes` is used.

        Raises:
            PluginError: the parser can't be loaded.
        """
        made: Any = make_plugin(ref_for("tool_parser", parser or HERMES), context)
        made.start()
        return cls(made, context.tokenizer, TextEncoder(context.tokenizer))

    def read(
        self, call: ModelCall, turn: Turn, made: Completion, begun: int, name: str
    ) -> tuple[ModelAnswer, Message | None]:
        """Return the answer to a program's model call, and the turn as a chat message with its tool calls removed.

        The message is None if the turn's tool calls can't be parsed, or if the model call allows no tool calls but the turn has some.

        Args:
            call: the call to answer.
            turn: the latest turn of its sequence.
            made: the tokens of the turn's sequence, with their log-probabilities if the engine returned any.
            begun: the number of prompt tokens of the sequence.
            name: the name of the turn, unique in the episode.
        """
        text, stopped_by = _without_stop(turn, call.stop)
        parsed = self.parser.parse(text, call.tools)
        wanted = bool(call.tools and call.may_call)
        readable = not parsed.errors and (wanted or not parsed.calls)
        calls = [_message_call(c, name) for c in parsed.calls] if readable else []
        cut = turn.finish_reason is FinishReason.LENGTH
        answer = ModelAnswer(
            content=parsed.content if readable else _behind(text, parsed),
            reasoning=parsed.reasoning,
            calls=calls,
            finish="tool_calls" if calls else "length" if cut else "stop",
            stopped_by=stopped_by,
            prompt_tokens=begun + turn.start,
            tokens=turn.stop - turn.start,
            log_probs=self._log_probs(made, turn) if call.log_probs else (),
        )
        produced = {"content": answer.content, "reasoning_content": answer.reasoning}
        return answer, produced if readable else None

    def _log_probs(self, made: Completion, turn: Turn) -> list[tuple[str, float]]:
        """Return text and log-probability (nats) of each token of a turn; empty without log-probabilities."""
        values_T = made.raw_log_probs if made.log_probs is None else made.log_probs
        if values_T is None:
            return []
        own = slice(turn.start, turn.stop)
        texts = [self.tokenizer.decode([i]) for i in made.response_ids[own].tolist()]
        return list(zip(texts, map(float, values_T[own]), strict=True))


def _without_stop(turn: Turn, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text of a turn before its first stop string, and this stop string; the whole text and None if no stop string ended it."""
    if turn.finish_reason is FinishReason.STOP:
        places = [(turn.text.find(one), one) for one in stop if one in turn.text]
        if places:
            place, one = min(places)
            return turn.text[:place], one
    return turn.text, None


def _behind(text: str, parsed: ParsedTurn) -> str:
    """Return the text of a turn that follows the reasoning and its closing tag; tool calls stay in the text."""
    if parsed.reasoning is None:
        return text
    _, _, rest = text.partition(parsed.reasoning)
    _, closed, behind = rest.partition(">")
    return (behind if closed else rest).strip()


def _message_call(call: ToolCall, turn: str) -> MessageCall:
    """Return a call in the form of chat templates.

    An id such as `call_0`, which only numbers the calls of its turn, is replaced by an id that is unique in the episode.
    """
    name = call.id
    if name.startswith("call_"):
        name = hashlib.sha256(f"{turn}.{name}".encode()).hexdigest()[:_ID_LENGTH]
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": name, "type": "function", "function": function}
