"""EpisodeEndpoint: answers the calls of one episode with the policy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs

from dovetail.errors import RequestRefusedError
from dovetail.interfaces import (
    CountedTime,
    EpisodeEnd,
    EpisodeEndedError,
    EpisodeError,
    FailureKind,
    Message,
    Session,
)
from dovetail_gateway.config import GatewaySection
from dovetail_gateway.dialects.call import ApiError, ModelAnswer, ModelCall
from dovetail_gateway.sequences import EpisodeSequences, ServedSequence, prompt_ids
from dovetail_gateway.turn_reader import TurnReader

_LAST_SECONDS = 5.0
"""Seconds that a program may continue after its episode has no turns or tokens left."""


class EpisodeEndpoint:
    """Answers the calls of one episode with the policy. All methods run on the event loop of the episodes.

    Args:
        session: the first session of the episode; a session is one token sequence, of prompts and the policy's turns.
        config: the config of the agent loop.
        reader: the reader that parses turns.

    Attributes:
        session: the first session of the episode.
        loop: the event loop of the episodes.
        ended: the limit that the episode reached, or None.
        fault: the error that failed the episode, or None.
        closing: an event that is set when no further call will be answered.
        on_busy: a function that is called when a call begins or ends; its argument is whether any call is running.
    """

    def __init__(self, session: Session, config: GatewaySection, reader: TurnReader) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: EpisodeEnd | None = None
        self.fault: BaseException | None = None
        self.closing = asyncio.Event()
        self.on_busy: Callable[[bool], None] = lambda _: None
        self.session, self._config, self._reader = session, config, reader
        self._sequences = EpisodeSequences(session, reader.encoder)
        self._running: set[asyncio.Task[Any]] = set()
        self._responses: dict[str, Sequence[Message]] = {}
        self._latest: Session | None = None

    async def answer(self, call: ModelCall, name: str) -> list[ModelAnswer]:
        """Let the policy answer a call, and return the answers; refused calls are counted.

        Args:
            call: a program's call.
            name: the name of the response, by which a later call may refer to it.

        Raises:
            ApiError: the call is refused, or the episode has ended or failed.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            self._check_room()
            self._running.add(task)
            self.on_busy(True)
            return await self._answer(call, name)
        except Exception as error:
            refusal = self._refusal(error)
            self.refused(refusal.code)
            raise refusal from error
        finally:
            self._running.discard(task)
            self.on_busy(bool(self._running))

    @asynccontextmanager
    async def within(self, seconds: float | None, who: str, key: str) -> AsyncIterator[None]:
        """Limit the running time of a `with` block to `seconds`, not counting time in which a call is answered.

        No limit applies if `seconds` is None.

        Raises:
            EpisodeError: the block took longer; the message names `who` and the key of the limit.
        """
        timeout = asyncio.timeout(seconds)
        clock = CountedTime(seconds or math.inf, timeout)
        self.on_busy = lambda busy: clock.stop() if busy else clock.go_on()
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            message = f"{who} was ended: it took longer than {seconds:g} s, not counting its calls of the policy ({key})"
            raise EpisodeError(FailureKind.LIMIT, message) from None
        finally:
            self.on_busy = lambda _: None

    def continues(self, call: ModelCall) -> bool:
        """Return whether a call continues one of the episode's sequences."""
        earlier = call.body.get("previous_response_id")
        if self.closing.is_set() or self.ended is not None:
            return False
        return earlier in self._responses if earlier else self._sequences.find(call)[0] is not None

    def refused(self, code: str) -> None:
        """Count a refused call in the episode's metrics, by the name of its error."""
        self.session.count(f"refused_calls/{code}")

    def _refusal(self, error: Exception) -> ApiError:
        """Return the API error for a raised error; an error that the call did not cause also ends or fails the episode."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EpisodeEndedError):
            if self.ended is None:  # the program may continue for a moment, to write its results
                self.ended = error.end
                self.loop.call_later(_LAST_SECONDS, self.closing.set)
            return _at_limit(error.end)
        self._fail(error)
        if isinstance(error, EpisodeError):
            return ApiError(400, "episode_failed", str(error))
        refused = isinstance(error, RequestRefusedError)
        how = (400, "context_length_exceeded") if refused else (500, "engine_failed")
        return ApiError(*how, f"the policy can't answer the call: {error}")

    def _fail(self, error: BaseException) -> None:
        self.fault = self.fault or error
        self.closing.set()

    def _check_room(self) -> None:
        if self.closing.is_set():
            raise ApiError(403, "episode_ended", "the episode of this key has ended")
        if self.ended is not None:
            raise _at_limit(self.ended)
        if len(self._running) >= self._config.max_pending_calls:
            limit = self._config.max_pending_calls
            message = f"the program has more calls under way than its limit of {limit} (max_pending_calls)"
            self._fail(EpisodeError(FailureKind.LIMIT, message))
            raise ApiError(429, "too_many_calls", message)

    async def _answer(self, call: ModelCall, name: str) -> list[ModelAnswer]:
        models = self._config.models
        if call.model not in models and "*" not in models:
            message = f"the model {call.model!r} does not exist; expected {' or '.join(models)}"
            hint = f"set rollout.agent_loop.models=[{call.model}], or make the program request {models[0]!r}"
            self._fail(EpisodeError(FailureKind.ENVIRONMENT, message, hint=hint))
            raise ApiError(404, "model_not_found", message, param="model")
        call = self._with_earlier(call)
        self.session.count("model_calls")
        for field in call.unapplied:
            self.session.count(f"unapplied/{field}")
        first = await self._continued(call)
        try:
            copies = [self._sequences.copy(first) for _ in range(call.n - 1)]
            if copies:
                self.session.count("further_sequences/n", len(copies))
            async with asyncio.TaskGroup() as group:
                turns = [group.create_task(self._turn(s, call)) for s in (first, *copies)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            first.busy = False
        answers = [turn.result() for turn in turns]
        self._responses[name] = [*call.messages, answers[0].message]
        return answers

    def _with_earlier(self, call: ModelCall) -> ModelCall:
        """Return a call with the messages of the conversation up to its `previous_response_id` put before its own messages.

        A call without this field is returned unchanged.
        """
        earlier = call.body.get("previous_response_id")
        if earlier is None:
            return call
        if earlier not in self._responses:
            message = f"previous_response_id is {earlier!r}, which is not the id of a response to a call with this API key"
            raise ApiError(404, "response_not_found", message, param="previous_response_id")
        own, before = list(call.messages), list(self._responses[earlier])
        if own[0]["role"] == "system":  # instructions are not carried over
            before = [own.pop(0), *before[before[0]["role"] == "system" :]]
        return attrs.evolve(call, messages=[*before, *own])

    async def _continued(self, call: ModelCall) -> ServedSequence:
        """Return the sequence that answers a call, marked as busy and with all messages of the call."""
        found, why = self._sequences.find(call)
        if found is None:
            if self._sequences.unknown(call):
                self.session.count("unknown_turns")
                if self._config.unknown_turns == "fail":
                    message = "the call is refused: its history has an assistant's turn that the policy did not produce (unknown_turns=fail)"
                    raise EpisodeError(FailureKind.ENVIRONMENT, message)
            if self._latest is not None:
                self.session.count(f"further_sequences/{why}")
            found = self._sequences.begin(call)
            found.busy = True
            return found
        found.busy, found.begun = True, len(found.messages)
        rest = found.rest(call)
        try:
            if rest:
                await found.session.observe(rest, found.calls, produced=found.produced)
                found.messages += rest
                found.asked = True
        except BaseException:
            found.busy = False
            raise
        return found

    async def _turn(self, sequence: ServedSequence, call: ModelCall) -> ModelAnswer:
        """Generate a turn of the policy in a sequence, and return the answer."""
        session = sequence.session
        turn = await session.generate(max_new_tokens=call.max_tokens, stop=call.stop)
        self._latest = session
        made = session.completion()
        if call.log_probs and made.log_probs is None and made.raw_log_probs is None:
            self.session.count("unapplied/logprobs")
        begun, name = len(prompt_ids(session, made)), f"{sequence.number}.{len(session.turns)}"
        answer, sequence.produced = self._reader.read(call, turn, made, begun, name)
        sequence.calls = answer.calls
        self._sequences.answered(sequence, answer.message, turn.text)
        return answer

    def reward(self, value: float) -> None:
        """Add `value` to the reward of the latest turn. Without turns, do nothing, since such an episode fails."""
        if self._latest is not None:
            self._latest.reward(value)

    async def close(self) -> None:
        """Cancel running calls, and add the number of prompt tokens to the episode's metrics."""
        self.closing.set()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            self.session.count("abandoned_calls", len(running))
            await asyncio.gather(*running, return_exceptions=True)
        total, unique = self._sequences.prompt_tokens()
        self.session.count("prompt_tokens", total)
        self.session.count("unique_prompt_tokens", unique)


def _at_limit(end: EpisodeEnd) -> ApiError:
    """Return the error of a call for which the episode has no turns or tokens left."""
    message = f"the episode has reached its limit on {end}"
    if end is EpisodeEnd.TOKENS:
        what = f"{message}, counting both generated and observed tokens (data.max_response_length)"
        return ApiError(400, "context_length_exceeded", what, param="messages")
    return ApiError(403, "episode_ended", f"{message} (max_turns)")
