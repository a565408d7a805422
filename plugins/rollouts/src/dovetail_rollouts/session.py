"""EpisodeSession: the tokens of one sequence of an episode, which are appended and never rendered again. T response tokens."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.interfaces import (
    Completion,
    EpisodeEnd,
    EpisodeEndedError,
    EpisodeError,
    FailureKind,
    FinishReason,
    Message,
    MessageCall,
    Prompt,
    RolloutRequest,
    Session,
    Trajectory,
    Turn,
)
from dovetail.sections import EpisodeSection
from dovetail.text import encodable
from dovetail_rollouts.turn_encoder import RenderedHistory, TurnEncoder, ended_by

Ask = Callable[[RolloutRequest], Awaitable[Completion]]
"""A function that returns the complete response to a request of one sample, also if generation was interrupted and continued."""


class EpisodeSession(Session):
    """Builds one token sequence of an episode: the prompt, the policy's turns and the messages between them.

    `fork` begins another sequence of the same episode.

    Args:
        request: the request of this sample alone: its prompt, sampling and random stream. `max_new_tokens` limits the
            number of response tokens of all the episode's sequences together; a sequence has at most as many tokens as the prompt plus
            `max_new_tokens`.
        prompt: the dataset row.
        sample_id: the sample id of the sample.
        number: the index of the sample among the prompt's samples.
        ask: a function that sends a request to the policy.
        encoder: the encoder of messages after a turn.
        limits: the limits of the episode.
        forks: whether `fork` is allowed.
    """

    def __init__(
        self,
        request: RolloutRequest,
        prompt: Prompt,
        *,
        sample_id: str,
        number: int,
        ask: Ask,
        encoder: TurnEncoder,
        limits: EpisodeSection,
        forks: bool = False,
    ) -> None:
        raw = prompt.raw
        self.prompt, self.sample_id = prompt, sample_id
        self.turns: list[Turn] = []
        self.counts: dict[str, float] = {}
        self._prompt_ids = request.prompt_ids
        self._messages = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
        self._path: tuple[int, ...] = ()
        """The numbers of the forks that lead to this sequence; empty for the episode's first sequence."""
        self._sessions: dict[tuple[int, ...], EpisodeSession] = {(): self}
        """The sessions of all the episode's sequences, by path; forks share this mapping."""
        self._may_fork, self._forks = forks, 0
        self._request, self._number, self._ask = request, number, ask
        self._encoder, self._limits = encoder, limits
        self._history = (
            RenderedHistory(encoder, self._messages) if limits.on_history_change == "fork" else None
        )
        self.own_turns = slice(0, None)
        """The turns in the current sequence; earlier turns are in sequences that ended when the chat template changed them."""
        self._parts: list[Completion] = []
        self.begun = 0
        """Number of the policy's turns that have begun; turns of forks may run concurrently."""
        self.length = 0
        """Number of response tokens so far."""
        self._ended_by: int | None = None
        """The latest token, if the policy ended its turn with this token."""
        self._out_of_tokens = False
        """Whether the latest turn was cut because the episode had no tokens left, and not by the turn's own limit."""

    @property
    def tokens_left(self) -> int:
        return self._left(len(self._prompt_ids) + self.length)

    def _left(self, length: int) -> int:
        """Return the number of tokens that a sequence of this length, prompt included, may still get."""
        limit = self._request.sampling.max_new_tokens
        used = sum(session.length for session in self._sessions.values())
        return min(limit - used, len(self._request.prompt_ids) + limit - length)

    async def generate(
        self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        if sum(s.begun for s in self._sessions.values()) >= self._limits.max_turns:
            raise EpisodeEndedError(EpisodeEnd.TURNS)
        if self.tokens_left <= 0:
            raise EpisodeEndedError(EpisodeEnd.TOKENS)
        sampling, number = self._request.sampling, len(self.turns)
        left = self.tokens_left
        limits = (left, self._limits.max_turn_tokens, max_new_tokens)
        sampling = attrs.evolve(
            sampling,
            max_new_tokens=min(limit for limit in limits if limit is not None),
            stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
        )
        self.begun += 1
        found = await self._ask(
            attrs.evolve(
                self._request,
                request_id=".".join((self.sample_id, *(f"f{i}" for i in self._path), f"t{number}")),
                prompt_ids=np.concatenate([self._prompt_ids, self._ids()]),
                sampling=sampling,
                streams=(attrs.evolve(self._request.streams[0], turn=number, fork=self._name),),
            )
        )
        start = self._append(found)
        ids = found.response_ids.tolist()
        self._ended_by = ended_by(found, sampling, self._encoder)
        ended = self._ended_by is not None
        cut = found.finish_reason is FinishReason.LENGTH
        self._out_of_tokens = cut and sampling.max_new_tokens == left
        turn = Turn(
            start=start,
            stop=self.length,
            text=self._encoder.decode(ids[:-1] if ended else ids),
            finish_reason=found.finish_reason,
        )
        self.turns.append(turn)
        if self._history is not None:
            self._history.produced(turn.text)
        return turn

    async def observe(
        self,
        messages: str | Sequence[Message],
        calls: Sequence[MessageCall] = (),
        *,
        produced: Message | None = None,
    ) -> None:
        if not self.turns:
            raise EpisodeError(
                FailureKind.HARNESS,
                "the agent loop called `observe` before the policy produced a turn",
                hint="call `generate` first; before the first turn, a session has only the row's prompt",
            )
        messages, calls, produced = encodable((messages, calls, produced))
        shown = (
            [{"role": "assistant", "content": messages}] if isinstance(messages, str) else messages
        )
        limit, side = self._limits.max_observation_tokens, self._limits.observation_cut
        shown = [self._encoder.shortened(message, limit, side) for message in shown]
        anew = None
        if isinstance(messages, str):
            ids = self._encoder.encode_given(str(shown[0]["content"]), "assistant")
            if self._history is not None:
                self._history.produced(str(shown[0]["content"]))
        else:
            ids = self._after(shown, calls)
            anew = self._rendered_anew(shown, calls, produced)
        left = self.tokens_left - len(ids) if anew is None else self._left(len(anew))
        if left <= 0:
            raise EpisodeEndedError(EpisodeEnd.TOKENS)
        latest = self.turns[-1]
        self.turns[-1] = attrs.evolve(
            latest,
            calls=(*latest.calls, *calls),
            observed=(*latest.observed, *shown),
        )
        if anew is None:
            self._append_shown(ids)
        else:
            self._begin_anew(anew)
        self._ended_by = None

    def _append_shown(self, ids: Sequence[int]) -> None:
        none = np.zeros(len(ids), np.float32)
        sampling = self._request.sampling
        self._append(
            Completion(
                request_id=self.sample_id,
                sample=self._number,
                response_ids=np.array(ids, np.int64),
                finish_reason=self.turns[-1].finish_reason,
                weight_versions=np.full(len(ids), -1, np.int64),
                log_probs=none if sampling.log_probs else None,
                raw_log_probs=none if sampling.raw_log_probs else None,
                response_mask=np.zeros(len(ids), np.bool_),
            )
        )

    def _rendered_anew(
        self, shown: Sequence[Message], calls: Sequence[MessageCall], produced: Message | None
    ) -> np.ndarray | None:
        """Return the prompt of a new sequence, int64 [P], if the template changes earlier turns once `shown` follows them; else None."""
        if self._history is None:
            return None
        try:
            appended = self._encoder.after(self._messages, shown, calls=calls, ended_by=None)
            text = self._history.observed(shown, calls, produced, self._encoder.decode(appended))
        except Exception as error:
            raise _not_rendered(shown, "after the earlier turns", error) from error
        if text is None:
            return None
        if self.prompt.media:
            raise EpisodeError(
                FailureKind.HARNESS,
                "the chat template changes earlier turns, and a prompt with images can't be rendered again",
                hint="set rollout.agent_loop.on_history_change=keep",
            )
        return np.array(self._encoder.encode(text), np.int64)

    def _begin_anew(self, prompt_ids: np.ndarray) -> None:
        """Continue in a new sequence that begins with these tokens; the previous tokens remain a sequence of their own."""
        past, count = copy.copy(self), len(self.turns)
        past.own_turns = slice(self.own_turns.start, count)
        self._sessions[self._path] = past
        self._path, self._forks = (*self._path, self._forks), 0
        self._sessions[self._path] = self
        self.own_turns, self._prompt_ids = slice(count, None), prompt_ids
        self._parts, self.begun, self.length = [], 0, 0

    def reward(self, value: float, turn: int | None = None) -> None:
        number = len(self.turns) - 1 if turn is None else turn
        if not 0 <= number < len(self.turns):
            raise EpisodeError(
                FailureKind.HARNESS,
                f"turn {turn} can't get a reward: the session has {len(self.turns)} turns, numbered from 0",
            )
        if not math.isfinite(value):
            raise EpisodeError(
                FailureKind.ENVIRONMENT,
                f"the reward of turn {number} is {value}; expected a finite number",
            )
        rewarded = self.turns[number]
        self.turns[number] = attrs.evolve(rewarded, reward=rewarded.reward + float(value))

    def begin(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> EpisodeSession:
        return self._forked(messages, self._encoder.with_tools(encodable(tools)))

    def fork(self, messages: Sequence[Message] | None = None) -> EpisodeSession:
        return self._forked(messages, self._encoder)

    def _forked(self, messages: Sequence[Message] | None, encoder: TurnEncoder) -> EpisodeSession:
        if not self._may_fork:
            raise EpisodeError(
                FailureKind.HARNESS,
                "the agent loop forks its session, but its class does not declare the capability 'forks'",
                hint='set capabilities = frozenset({"forks"}) in the class',
            )
        if messages is not None and self.prompt.media:
            raise EpisodeError(
                FailureKind.HARNESS,
                "a session whose prompt has images can't be forked with messages, which are rendered without images",
                hint="fork without messages: the fork then begins with the tokens of the session",
            )
        messages = encodable(messages)
        path = (*self._path, self._forks)
        self._forks += 1
        fork = EpisodeSession(
            self._request,
            self.prompt,
            sample_id=self.sample_id,
            number=self._number,
            ask=self._ask,
            encoder=encoder,
            limits=self._limits,
            forks=True,
        )
        fork._path, fork._sessions, fork.counts = path, self._sessions, self.counts
        if messages is None:
            fork._prompt_ids = np.concatenate([self._prompt_ids, self._ids()])
            fork._messages = self._messages
            fork._history = self._history and self._history.copy()
        else:
            fork._prompt_ids = np.array(fork._rendered(messages), np.int64)
            fork._messages = list(messages)
            fork._history = self._history and RenderedHistory(encoder, messages)
        if fork.tokens_left <= 0:
            raise EpisodeEndedError(EpisodeEnd.TOKENS)
        self._sessions[path] = fork
        return fork

    def trajectory(self, end: EpisodeEnd, seconds: float) -> Trajectory:
        """Return the trajectory of the finished episode, over all its sequences."""
        turns = [
            attrs.evolve(turn, sequence=number)
            for number, session in enumerate(self._sequences())
            for turn in session.turns[session.own_turns]
        ]
        return Trajectory(
            turns=tuple(turns),
            end=end,
            seconds=seconds,
            began=time.time() - seconds,
            counts=dict(self.counts),
            output=encodable(self.output),
        )

    def completions(self, end: EpisodeEnd) -> tuple[Completion, ...]:
        """Return the response so far of each sequence in which the policy had a turn, in order; at least that of the first sequence."""
        return tuple(session.completion(end) for session in self._sequences())

    def completion(self, end: EpisodeEnd = EpisodeEnd.DONE) -> Completion:
        """Return this sequence's response so far; observations have mask 0, version −1 and log-probability 0.

        Observations after the policy's last turn are left out. The `finish_reason` is `length` if the episode had no tokens left, but not
        if only a turn reached its own limit.
        """
        parts = self._parts[
            : 1 + max((i for i, p in enumerate(self._parts) if p.response_mask is None), default=-1)
        ]
        whole = Completion(
            request_id=self._request.request_id,
            sample=self._number,
            response_ids=_joined([part.response_ids for part in parts], np.int64),
            finish_reason=self._finish_reason(end),
            weight_versions=_joined([part.weight_versions for part in parts], np.int64),
            response_mask=_joined([part.produced_T for part in parts], np.bool_),
            prompt_ids=self._prompt_ids if self._path else None,
        )
        return attrs.evolve(
            whole,
            log_probs=_all_of([part.log_probs for part in parts]),
            raw_log_probs=_all_of([part.raw_log_probs for part in parts]),
        )

    def _finish_reason(self, end: EpisodeEnd) -> FinishReason:
        turns = self.turns[self.own_turns]
        if not turns or end is EpisodeEnd.TOKENS or self._out_of_tokens:
            return FinishReason.LENGTH
        reason = turns[-1].finish_reason
        return FinishReason.STOP if reason is FinishReason.LENGTH else reason

    def _after(self, messages: Sequence[Message], calls: Sequence[MessageCall]) -> list[int]:
        try:
            return self._encoder.after(
                self._messages, messages, calls=calls, ended_by=self._ended_by
            )
        except Exception as error:
            raise _not_rendered(messages, f"after turn {len(self.turns) - 1}", error) from error

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        try:
            return self._encoder.encode(self._encoder.render(messages, generate=True))
        except Exception as error:
            raise _not_rendered(messages, "at the beginning of a fork", error) from error

    @property
    def _name(self) -> str:
        return ".".join(map(str, self._path))

    def _sequences(self) -> list[EpisodeSession]:
        """Return the sequences with a turn of the policy, else only the first; each precedes its forks, whatever the timing."""
        ordered = [self._sessions[path] for path in sorted(self._sessions)]
        return [session for session in ordered if session.turns[session.own_turns]] or ordered[:1]

    def _append(self, part: Completion) -> int:
        start = self.length
        self._parts.append(part)
        self.length += len(part.response_ids)
        return start

    def _ids(self) -> np.ndarray:
        return _joined([part.response_ids for part in self._parts], np.int64)


def _not_rendered(messages: Sequence[Message], where: str, error: Exception) -> EpisodeError:
    roles = ", ".join(str(message.get("role")) for message in messages)
    return EpisodeError(
        FailureKind.HARNESS,
        f"the chat template can't render {len(messages)} message(s) ({roles}) {where}: {type(error).__name__}: {error}",
        hint="set model.chat_template to a template that renders them",
    )


def _all_of(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate the rows, float32 [T]; None if a row is missing, or if there are none."""
    there = [row for row in rows if row is not None]
    return _joined(there, np.float32) if there and len(there) == len(rows) else None


def _joined(rows: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Concatenate the rows, [T]."""
    return np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype, copy=False)
