"""EpisodeSession: the tokens of one episode, which are appended and never rendered again. T tokens of its response."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from dovetail.interfaces.agent_loop import EpisodeEndedError, EpisodeError, Session
from dovetail.interfaces.reward import FailureKind
from dovetail.interfaces.rollout import Completion, FinishReason, RolloutRequest
from dovetail.interfaces.trajectory import EpisodeEnd, Trajectory, Turn
from dovetail.sections.agent_loop import EpisodeSection

if TYPE_CHECKING:
    from dovetail.data.turn_encoder import TurnEncoder
    from dovetail.interfaces.data import Prompt
    from dovetail.interfaces.trajectory import Message, MessageCall

Ask = Callable[[RolloutRequest], Awaitable[Completion]]
"""Returns the response to a request of one sample, whole even where it was cut short meanwhile."""


class EpisodeSession(Session):
    """Builds one response out of what the policy produces and what it is shown.

    Args:
        request: of the episode's sample alone: its prompt, sampling and stream. `max_new_tokens` bounds the whole response.
        prompt: the row of data.
        sample_id: of the sample.
        number: which of the prompt's samples it is.
        ask: has the policy answer.
        encoder: encodes what follows a turn.
        limits: of the episode.
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
    ) -> None:
        self.prompt, self.sample_id = prompt, sample_id
        self.turns: list[Turn] = []
        self.counts: dict[str, float] = {}
        self._request, self._number, self._ask = request, number, ask
        self._encoder, self._limits = encoder, limits
        self._parts: list[Completion] = []
        self._length = 0
        self._ended_by: int | None = None
        """The latest token, where the policy ended its turn with it."""

    @property
    def tokens_left(self) -> int:
        return self._request.sampling.max_new_tokens - self._length

    async def generate(
        self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        if len(self.turns) >= self._limits.max_turns:
            raise EpisodeEndedError(EpisodeEnd.TURNS)
        if self.tokens_left <= 0:
            raise EpisodeEndedError(EpisodeEnd.TOKENS)
        sampling, number = self._request.sampling, len(self.turns)
        limits = (self.tokens_left, self._limits.max_turn_tokens, max_new_tokens)
        sampling = attrs.evolve(
            sampling,
            max_new_tokens=min(limit for limit in limits if limit is not None),
            stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
        )
        found = await self._ask(
            attrs.evolve(
                self._request,
                request_id=f"{self.sample_id}.t{number}",
                prompt_ids=np.concatenate([self._request.prompt_ids, self._ids()]),
                sampling=sampling,
                streams=(attrs.evolve(self._request.streams[0], turn=number),),
            )
        )
        start = self._append(found)
        ids = found.response_ids.tolist()
        ended = found.finish_reason is FinishReason.STOP and self._ends_turn(ids)
        self._ended_by = ids[-1] if ended else None
        turn = Turn(
            start=start,
            stop=self._length,
            text=self._encoder.decode(ids[:-1] if ended else ids),
            finish_reason=found.finish_reason,
        )
        self.turns.append(turn)
        return turn

    async def observe(
        self, messages: str | Sequence[Message], calls: Sequence[MessageCall] = ()
    ) -> None:
        if not self.turns:
            raise EpisodeError(
                FailureKind.HARNESS,
                "the agent loop observes before the policy has produced a turn",
                hint="have the session generate first; what stands before the first turn is the row's prompt",
            )
        shown = (
            [{"role": "assistant", "content": messages}] if isinstance(messages, str) else messages
        )
        limit, side = self._limits.max_observation_tokens, self._limits.observation_cut
        shown = [self._encoder.shortened(message, limit, side) for message in shown]
        if isinstance(messages, str):
            ids = self._encoder.encode(str(shown[0]["content"]))
        else:
            ids = self._after(shown, calls)
        if len(ids) >= self.tokens_left:
            raise EpisodeEndedError(EpisodeEnd.TOKENS)
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
        self._ended_by = None
        latest = self.turns[-1]
        self.turns[-1] = attrs.evolve(
            latest,
            calls=(*latest.calls, *calls),
            observed=(*latest.observed, *shown),
        )

    def reward(self, value: float, turn: int | None = None) -> None:
        number = len(self.turns) - 1 if turn is None else turn
        if not 0 <= number < len(self.turns):
            raise EpisodeError(
                FailureKind.HARNESS,
                f"a reward is given for turn {turn}; expected one of {len(self.turns)} turns, from 0",
            )
        if not math.isfinite(value):
            raise EpisodeError(
                FailureKind.ENVIRONMENT,
                f"turn {number} is given the reward {value}; expected a finite number",
            )
        rewarded = self.turns[number]
        self.turns[number] = attrs.evolve(rewarded, reward=rewarded.reward + float(value))

    def trajectory(self, end: EpisodeEnd, seconds: float) -> Trajectory:
        """Return what has happened, as ended."""
        return Trajectory(
            turns=tuple(self.turns), end=end, seconds=seconds, counts=dict(self.counts)
        )

    def completion(self, end: EpisodeEnd = EpisodeEnd.DONE) -> Completion:
        """Return the response so far: observations have mask 0, version −1 and log-probability 0.

        What the policy was shown after its last turn is left out: it produced nothing after that.
        """
        parts = self._parts[
            : 1 + max((i for i, p in enumerate(self._parts) if p.response_mask is None), default=-1)
        ]
        whole = Completion(
            request_id=self._request.request_id,
            sample=self._number,
            response_ids=_joined([part.response_ids for part in parts], np.int64),
            finish_reason=FinishReason.LENGTH,
            weight_versions=_joined([part.weight_versions for part in parts], np.int64),
            response_mask=_joined([part.produced_T for part in parts], np.bool_),
        )
        if self.turns and end is not EpisodeEnd.TOKENS:
            whole = attrs.evolve(whole, finish_reason=self.turns[-1].finish_reason)
        return attrs.evolve(
            whole,
            log_probs=_all_of([part.log_probs for part in parts]),
            raw_log_probs=_all_of([part.raw_log_probs for part in parts]),
        )

    def _after(self, messages: Sequence[Message], calls: Sequence[MessageCall]) -> list[int]:
        raw = self.prompt.raw
        prompt = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
        try:
            return self._encoder.after(prompt, messages, calls=calls, ended_by=self._ended_by)
        except Exception as error:
            raise EpisodeError(
                FailureKind.HARNESS,
                f"the chat template does not take {len(messages)} messages ({', '.join(str(m.get('role')) for m in messages)}) "
                f"after turn {len(self.turns) - 1}: {type(error).__name__}: {error}",
                hint="set model.chat_template to a template that takes them",
            ) from error

    def _ends_turn(self, ids: Sequence[int]) -> bool:
        """Whether the policy's last token is one that ends a turn, and not part of a string that does."""
        stops = self._request.sampling.stop_token_ids
        return bool(ids) and (ids[-1] in stops or self._encoder.is_special(ids[-1]))

    def _append(self, part: Completion) -> int:
        start = self._length
        self._parts.append(part)
        self._length += len(part.response_ids)
        return start

    def _ids(self) -> np.ndarray:
        return _joined([part.response_ids for part in self._parts], np.int64)


def _all_of(rows: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The rows end to end, float32 [T]; None where one is missing, or all."""
    there = [row for row in rows if row is not None]
    return _joined(there, np.float32) if there and len(there) == len(rows) else None


def _joined(rows: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """The rows end to end, [T]."""
    return np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype, copy=False)
