"""EpisodeEndpoint: answers the calls of one episode, with the policy."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import attrs

from dovetail.data import TextEncoder
from dovetail.interfaces import (
    Completion,
    EpisodeEnd,
    EpisodeEndedError,
    EpisodeError,
    FailureKind,
    FinishReason,
    Message,
    MessageCall,
    ParsedTurn,
    Session,
    ToolCall,
    ToolParser,
    Turn,
)
from dovetail_gateway.config import ProgramConfig
from dovetail_gateway.dialects.call import ApiError, ModelAnswer, ModelCall
from dovetail_gateway.sequences import EpisodeSequences, ServedSequence, prompt_ids

_LAST_SECONDS = 5.0
"""How long a program may go on once its episode has no turns or tokens left."""
_ID_LENGTH = 9
"""Characters of a tool call's id: as many as templates of Mistral take."""


@attrs.frozen
class TurnReader:
    """Takes a turn of the policy apart.

    Args:
        parser: of the model's calls and reasoning.
        tokenizer: of the run.
        encoder: of the run's chat template.
    """

    parser: ToolParser
    tokenizer: Any
    encoder: TextEncoder

    def read(self, call: ModelCall, turn: Turn, name: str) -> tuple[ModelAnswer, bool]:
        """Return what a program is given of a turn, without figures, and whether the parser could read all of it.

        Args:
            call: that it answers.
            turn: of the policy.
            name: of the turn, unique in the episode.
        """
        text, stopped_by = _without_stop(turn, call.stop)
        parsed = self.parser.parse(text, call.tools)
        found = bool(parsed.calls or parsed.errors)
        readable = not parsed.errors and (not parsed.calls or bool(call.tools and call.may_call))
        content = parsed.content if readable else _behind(text, parsed)
        calls = [_message_call(c, name) for c in parsed.calls] if readable and found else []
        finish = "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
        answer = ModelAnswer(
            content=content,
            reasoning=parsed.reasoning,
            calls=calls,
            finish="tool_calls" if calls else finish,
            stopped_by=stopped_by,
            prompt_tokens=0,
            tokens=turn.stop - turn.start,
        )
        return answer, readable


class EpisodeEndpoint:
    """The sequences of one episode, and the calls that are under way. All its methods run on the event loop of the episodes.

    Args:
        session: the one that the episode begins with.
        config: of the agent loop.
        reader: takes turns apart.

    Attributes:
        session: the one that the episode begins with.
        loop: the event loop of the episodes.
        ended: the limit that the episode reached; None where it reached none.
        fault: what failed it; None where nothing did.
        closing: set once no further call will be answered.
        on_busy: called with whether a call is under way, where that changes.
    """

    def __init__(self, session: Session, config: ProgramConfig, reader: TurnReader) -> None:
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
        """Have the policy answer a call.

        Args:
            call: what a program asks.
            name: of the response, by which a later call may refer to it.

        Raises:
            ApiError: it is refused, or the episode has ended or failed.
        """
        self._check_open()
        task = asyncio.current_task()
        assert task is not None
        if len(self._running) >= self._config.max_pending_calls:
            limit = self._config.max_pending_calls
            message = f"the program has more than {limit} calls under way at once, its limit (max_pending_calls)"
            self._fail(EpisodeError(FailureKind.LIMIT, message))
            raise self.refused(ApiError(429, "too_many_calls", message))
        self._running.add(task)
        self.on_busy(True)
        try:
            return await self._answer(call, name)
        except ApiError as error:
            raise self.refused(error) from None
        except EpisodeEndedError as limit:
            self._end_at(limit.end)
            raise self.refused(_at_limit(limit.end)) from None
        except EpisodeError as error:
            self._fail(error)
            raise self.refused(ApiError(400, "episode_failed", str(error))) from None
        except Exception as error:
            self._fail(error)
            raise self.refused(
                ApiError(500, "engine_failed", "the policy can't be asked")
            ) from error
        finally:
            self._running.discard(task)
            self.on_busy(bool(self._running))

    def refused(self, error: ApiError) -> ApiError:
        """Count a call that is not answered, and return its error."""
        self.session.count(f"refused_calls/{error.code}")
        return error

    def _fail(self, error: BaseException) -> None:
        self.fault = self.fault or error
        self.closing.set()

    def _end_at(self, end: EpisodeEnd) -> None:
        """Let the program go on for a moment without the policy, to write what it has."""
        if self.ended is None:
            self.ended = end
            self.loop.call_later(_LAST_SECONDS, self.closing.set)

    def _check_open(self) -> None:
        if self.closing.is_set():
            raise self.refused(ApiError(403, "episode_ended", "the episode of this key has ended"))
        if self.ended is not None:
            raise self.refused(_at_limit(self.ended))

    async def _answer(self, call: ModelCall, name: str) -> list[ModelAnswer]:
        models = self._config.models
        if call.model not in models and "*" not in models:
            message = f"the model {call.model!r} is not served; expected {' or '.join(models)}"
            hint = f"set rollout.agent_loop.models=[{call.model}], or have the program ask for {models[0]!r}"
            self._fail(
                EpisodeError(
                    FailureKind.ENVIRONMENT, f"the program asked for a model: {message}", hint=hint
                )
            )
            raise ApiError(404, "model_not_found", message, param="model")
        call = self._with_earlier(call)
        self.session.count("model_calls")
        for field in call.unapplied:
            self.session.count(f"unapplied/{field}")
        first = await self._continued(call)
        copies = [self._sequences.copy(first) for _ in range(call.n - 1)]
        if copies:
            self.session.count("further_sequences/n", len(copies))
        try:
            answers = await _together([partial(self._turn, s, call) for s in (first, *copies)])
        finally:
            for sequence in (first, *copies):
                sequence.busy = False
        self._responses[name] = [*call.messages, answers[0].message]
        return answers

    def _with_earlier(self, call: ModelCall) -> ModelCall:
        """A call with the messages of the response that it refers to before its own."""
        earlier = call.body.get("previous_response_id")
        if earlier is None:
            return call
        if earlier not in self._responses:
            message = f"previous_response_id is {earlier!r}, which is no response of this key"
            raise ApiError(404, "response_not_found", message, param="previous_response_id")
        own, before = list(call.messages), list(self._responses[earlier])
        if own[0]["role"] == "system":  # instructions are not carried over
            before = [own.pop(0), *before[before[0]["role"] == "system" :]]
        return attrs.evolve(call, messages=[*before, *own])

    async def _continued(self, call: ModelCall) -> ServedSequence:
        """The sequence in which a call is answered, with all of the call in it; it is busy."""
        found, why = self._sequences.find(call)
        if found is None:
            self._check_known(call)
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

    def _check_known(self, call: ModelCall) -> None:
        if self._sequences.unknown(call):
            self.session.count("unknown_turns")
            if self._config.unknown_turns == "fail":
                message = "a call has an assistant's turn in its history that the policy did not produce (unknown_turns=fail)"
                raise EpisodeError(FailureKind.ENVIRONMENT, message)

    async def _turn(self, sequence: ServedSequence, call: ModelCall) -> ModelAnswer:
        """Have the policy answer in a sequence."""
        session = sequence.session
        turn = await session.generate(max_new_tokens=call.max_tokens, stop=call.stop)
        self._latest = session
        made = session.completion()
        begun = prompt_ids(session, made)
        answer, readable = self._reader.read(call, turn, f"{sequence.number}.{len(session.turns)}")
        answer = attrs.evolve(answer, prompt_tokens=len(begun) + turn.start)
        if call.log_probs:
            answer = attrs.evolve(answer, log_probs=self._log_probs(made, turn))
        sequence.calls = answer.calls
        sequence.produced = (
            {"content": answer.content, "reasoning_content": answer.reasoning} if readable else None
        )
        self._sequences.answered(sequence, answer.message, turn.text)
        return answer

    def _log_probs(self, made: Completion, turn: Turn) -> list[tuple[str, float]]:
        """Text and log-probability (nats) of each token of a turn; none where the engine is not asked for them."""
        values_T = made.raw_log_probs if made.log_probs is None else made.log_probs
        if values_T is None:
            self.session.count("unapplied/logprobs")
            return []
        own = slice(turn.start, turn.stop)
        texts = [self._reader.tokenizer.decode([i]) for i in made.response_ids[own].tolist()]
        return list(zip(texts, map(float, values_T[own]), strict=True))

    def reward(self, value: float) -> None:
        """Reward the latest turn.

        Raises:
            EpisodeError: there is none.
        """
        if self._latest is None:
            raise EpisodeError(
                FailureKind.ENVIRONMENT, "the program is rewarded, and has not asked the policy"
            )
        self._latest.reward(value)

    async def close(self) -> None:
        """Cancel the calls that are under way, and count the tokens of prompts."""
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
    """The error of a call for which the episode has no turns or no tokens left."""
    message = f"the episode has reached its limit on {end}"
    if end is EpisodeEnd.TOKENS:
        return ApiError(400, "context_length_exceeded", message, param="messages")
    return ApiError(403, "episode_ended", message)


def _without_stop(turn: Turn, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text of a turn up to the string that ended it, and that string."""
    if turn.finish_reason is FinishReason.STOP:
        places = [(turn.text.find(one), one) for one in stop if one in turn.text]
        if places:
            place, one = min(places)
            return turn.text[:place], one
    return turn.text, None


def _behind(text: str, parsed: ParsedTurn) -> str:
    """The text of a turn with its calls as they stand in it, behind the reasoning."""
    if parsed.reasoning is None:
        return text
    _, _, rest = text.partition(parsed.reasoning)
    _, closed, behind = rest.partition(">")
    return (behind if closed else rest).strip()


def _message_call(call: ToolCall, turn: str) -> MessageCall:
    """A call as chat templates take it; ids of parsers that number a turn's calls are unique in the episode."""
    name = call.id
    if name.startswith("call_"):
        name = hashlib.sha256(f"{turn}.{name}".encode()).hexdigest()[:_ID_LENGTH]
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": name, "type": "function", "function": function}


async def _together(
    works: Sequence[Callable[[], Coroutine[Any, Any, ModelAnswer]]],
) -> list[ModelAnswer]:
    """Await all; where one fails, or the wait is cancelled, the others have ended before that is raised."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
