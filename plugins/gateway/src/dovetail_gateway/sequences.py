"""The sequences of an episode. A call continues a sequence if the call's messages begin with the sequence's messages and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.interfaces import Completion, Message, MessageCall, Session
from dovetail_datasets import TextEncoder
from dovetail_gateway.dialects.call import ModelCall


@attrs.define(eq=False)
class ServedSequence:
    """One token sequence of an episode, as the messages that the program sees."""

    number: int
    """Index among the episode's sequences."""
    session: Session
    messages: list[Message]
    """The messages and answers so far."""
    tools: Sequence[Mapping[str, Any]]
    """Functions that the sequence's prompt describes."""
    spoken: dict[int, str] = attrs.field(factory=dict)
    """The text of each turn as the policy produced it, by the turn's index in the messages."""
    calls: Sequence[MessageCall] = ()
    """Tool calls of the sequence's latest turn."""
    produced: Message | None = None
    """The latest turn as a message, for rendering the conversation with the chat template; None to render the turn's text instead."""
    asked: bool = True
    """Whether the sequence ends with a call's messages, so that the policy answers next."""
    busy: bool = False
    """Whether a call is being answered in this sequence."""
    begun: int = 0
    """The number of messages that the sequence had before the call that is being answered."""

    def rest(self, call: ModelCall) -> Sequence[Message] | None:
        """Return the messages that a call adds to the sequence, or None if they can't be appended. Earlier messages are not compared."""
        rest = call.messages[len(self.messages) :]
        if self.asked:
            return rest if len(call.messages) == len(self.messages) else None
        appends = bool(rest) and all(message["role"] != "assistant" for message in rest)
        return rest if appends else None


class EpisodeSequences:
    """The sequences of an episode. Each call of the program continues or begins one.

    Args:
        session: the first session (token sequence) of the episode.
        encoder: the encoder of the run's chat template.
    """

    def __init__(self, session: Session, encoder: TextEncoder) -> None:
        self._root, self._encoder = session, encoder
        raw = session.prompt.raw
        messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else list(raw)
        self._produced = {_turn_key(m) for m in messages}
        """Keys of the known assistant turns: the policy's turns, and the turns of the dataset row."""
        self._all: list[ServedSequence] = []
        # The first sequence has the row's prompt only if both have the same tokens: a prompt may be raw text or have images.
        if np.array_equal(encoder.ids([self._text(messages, ())])[0], session.prompt.prompt_ids):
            self._add(session, messages, ())

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        return self._encoder.texts([(messages, list(tools) or None)], generate=True)[0]

    def find(self, call: ModelCall) -> tuple[ServedSequence | None, str]:
        """Return the longest sequence that a call continues; or None and the reason, such as `parallel`, why the call begins a sequence."""
        free = [
            s
            for s in self._all
            if not s.busy and list(s.tools) == list(call.tools) and s.rest(call) is not None
        ]
        found = [s for s in free if all(map(_same, s.messages, call.messages))]
        found = found or [s for s in free if self._reads_same(s, call)]
        if found:
            return max(found, key=lambda s: len(s.messages)), ""
        if any(s.busy and all(map(_same, s.messages[: s.begun], call.messages)) for s in self._all):
            return None, "parallel"
        if self.unknown(call):
            return None, "unknown_turn"
        return None, "other_history"

    def _reads_same(self, sequence: ServedSequence, call: ModelCall) -> bool:
        """Return whether the chat template renders a call's first messages like the sequence's messages, apart from white space."""
        theirs = call.messages[: len(sequence.messages)]
        if [m["role"] for m in theirs] != [m["role"] for m in sequence.messages]:
            return False
        ours = sequence.messages
        as_spoken = [
            {"role": "assistant", "content": sequence.spoken[i]} if i in sequence.spoken else m
            for i, m in enumerate(ours)
        ]
        try:
            texts = ["".join(self._text(m, call.tools).split()) for m in (theirs, ours, as_spoken)]
        except Exception:  # noqa: BLE001 - a template raises what it likes: the call then begins a sequence, or is refused
            return False
        return texts[0] in texts[1:]

    def unknown(self, call: ModelCall) -> bool:
        """Return whether a call has an assistant turn that neither the policy produced in this episode nor the row contains."""
        turns = (m for m in call.messages if m["role"] == "assistant")
        return any(_turn_key(m) not in self._produced for m in turns)

    def begin(self, call: ModelCall) -> ServedSequence:
        """Start a sequence with a call's messages; for errors see `Session.begin`."""
        session = self._root.begin(call.messages, call.tools)
        return self._add(session, call.messages, call.tools)

    def copy(self, sequence: ServedSequence) -> ServedSequence:
        """Begin a sequence with the tokens of `sequence`; the policy answers next."""
        made = self._add(sequence.session.fork(), sequence.messages, sequence.tools)
        made.spoken |= sequence.spoken
        return made

    def _add(
        self, session: Session, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ServedSequence:
        self._all.append(ServedSequence(len(self._all), session, list(messages), tools))
        return self._all[-1]

    def answered(self, sequence: ServedSequence, message: Message, text: str) -> None:
        """Record a turn in two forms: the message that programs see, and the text that the policy produced."""
        sequence.spoken[len(sequence.messages)] = text
        sequence.messages.append(message)
        sequence.asked = False
        self._produced.add(_turn_key(message))

    def prompt_tokens(self) -> tuple[int, int]:
        """Return the number of prompt tokens of all sequences with a turn, and how many of these tokens are in no earlier sequence."""
        rows: list[np.ndarray] = []
        total = unique = 0
        for sequence in self._all:
            if not sequence.session.turns:
                continue
            made = sequence.session.completion()
            prompt = prompt_ids(sequence.session, made)
            known = max((_common(prompt, row) for row in rows), default=0)
            total, unique = total + len(prompt), unique + len(prompt) - known
            rows.append(np.concatenate([prompt, made.response_ids]))
        return total, unique


def prompt_ids(session: Session, made: Completion) -> np.ndarray:
    """Return the prompt tokens with which a session began, int64 [P]: those of `made`, its completion, or else of the row's prompt."""
    return session.prompt.prompt_ids if made.prompt_ids is None else made.prompt_ids


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _same(ours: Message, theirs: Message) -> bool:
    """Return whether two messages are the same. Programs may leave out reasoning, and choose their own ids of calls."""
    if ours["role"] != theirs["role"]:
        return False
    if ours["role"] == "assistant":
        thoughts = [m.get("reasoning_content") for m in (ours, theirs)]
        return _turn_key(ours) == _turn_key(theirs) and (not all(thoughts) or len({*thoughts}) == 1)
    return bool(ours["content"] == theirs["content"])


def _turn_key(message: Message) -> str:
    """Return an assistant message's content and calls as a text to compare."""
    content = message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    called = [(f["name"], f["arguments"]) for f in functions]
    content = content.strip() if isinstance(content, str) else content
    return json.dumps([content, called], sort_keys=True, default=str)
