"""Episodes: runs an agent loop for each sample, and turns the loop's result or failure into a sample.

The loop is constructed from the config. The chat template is tried on the loop's kinds of observations before generation.
"""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    AgentLoop,
    Completion,
    CountedTime,
    EpisodeEnd,
    EpisodeEndedError,
    EpisodeError,
    Failure,
    FailureKind,
    Logger,
    Message,
    PluginContext,
    Prompt,
    RolloutRequest,
    RunningTime,
    Sample,
    Tokenizer,
    contained,
    error_text,
)
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import EpisodeSection, PluginSection, RunConfig
from dovetail_rollouts.session import EpisodeSession
from dovetail_rollouts.template_transitions import (
    CHOICES,
    OTHER_TEMPLATE,
    history_changes,
    not_rendered,
    observed_transitions,
)
from dovetail_rollouts.turn_encoder import TurnEncoder, ended_by

_KEY = "rollout.agent_loop"


Ask: TypeAlias = "Callable[[RolloutRequest, RunningTime], Awaitable[Completion]]"
"""A function that returns the single response to a request. It stops the clock of the `RunningTime` while the request is held back, as
during a weight update."""


class Episodes:
    """Runs the agent loop for each sample of a run, on the event loop of the rollout service.

    Args:
        loop: the started agent loop.
        tokenizer: the tokenizer of the run.
        tools: the functions that the chat template describes in every prompt.
        control_tokens: `data.control_tokens`; see `TextEncoder`.
    """

    def __init__(
        self,
        loop: AgentLoop,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        control_tokens: Literal["text", "allow"] = "text",
    ) -> None:
        self._loop, self._tokenizer = loop, tokenizer
        own = loop.config
        self._limits = own if isinstance(own, EpisodeSection) else EpisodeSection()
        self._encoder = TurnEncoder(tokenizer, tools, control_tokens)

    async def run(
        self, request: RolloutRequest, prompt: Prompt, *, sample_id: str, number: int, ask: Ask
    ) -> Sample:
        """Run one episode to its end.

        Args:
            request: the request of this sample alone.
            prompt: the dataset row.
            sample_id: the sample id of the sample.
            number: the index of the sample among the prompt's samples.
            ask: a function that sends a request to the policy.

        Returns:
            The sample, not yet scored. The sample of a failed episode has a Failure as its outcome, and the tokens so far.

        Raises:
            RolloutError: every replica failed, or a replica refused a request.
            DovetailError: lost replicas could not be restarted.
        """
        began, limit = time.monotonic(), self._limits.max_seconds
        timeout = asyncio.timeout(limit)
        counted = CountedTime(limit or math.inf, timeout)
        of_engine: list[BaseException] = []

        async def answer(part: RolloutRequest) -> Completion:
            try:
                return await ask(part, counted)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                of_engine.append(error)
                raise

        session = EpisodeSession(
            request,
            prompt,
            sample_id=sample_id,
            number=number,
            ask=answer,
            encoder=self._encoder,
            limits=self._limits,
            forks="forks" in self._loop.capabilities,
        )
        end, failure = EpisodeEnd.DONE, None
        try:
            async with timeout:
                await contained(self._loop.run(session))
        except EpisodeEndedError as ended:
            end = ended.end
        except EpisodeError as error:
            failure = Failure(kind=error.kind, message=str(error))
        except Exception as error:  # noqa: BLE001 - a loop, and what it calls, raises what it likes
            failure = self._failed(error)
        if timeout.expired():  # also if the loop swallowed its cancellation
            message = f"the episode took longer than {limit:g} s, its limit (max_seconds of agent loop {self._loop.name!r})"
            failure = Failure(kind=FailureKind.LIMIT, message=message)
        if of_engine:  # even if the loop caught the error
            raise of_engine[0]
        trajectory = session.trajectory(end, time.monotonic() - began)
        if failure is None and not trajectory.turns:
            message = f"agent loop {self._loop.name!r} ended without a turn of the policy"
            failure = Failure(kind=FailureKind.HARNESS, message=message)
        sequences = session.completions(end)
        return Sample(
            sample_id=sample_id,
            prompt=prompt,
            text="\n".join(
                self._text(sequences[t.sequence].response_ids[t.start : t.stop])
                for t in trajectory.turns
            ),
            completion=sequences[-1],
            earlier=sequences[:-1],
            trajectory=trajectory,
            outcome=failure,
        )

    def first_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Render messages as a prompt, int64 [P], with the functions that the chat template describes.

        Raises:
            Exception: an error of the chat template.
        """
        return np.array(
            self._encoder.encode(self._encoder.render(messages, generate=True)), np.int64
        )

    def next_prompt(self, request: RolloutRequest, sample: Sample, text: str) -> np.ndarray:
        """Return the prompt of an episode that continues an earlier one, int64 [P]: the earlier episode's tokens, then a user message.

        Args:
            request: the request of the earlier episode.
            sample: the sample of the earlier episode; if it has several sequences, the last sequence is continued.
            text: the text of the user message.

        Raises:
            Exception: the chat template's error if it does not accept a user message after the episode.
        """
        completion, trajectory = sample.completion, sample.trajectory
        if completion is None or trajectory is None or not trajectory.turns:
            raise ValueError(f"sample {sample.sample_id} has no turn to continue from")
        begin = request.prompt_ids if completion.prompt_ids is None else completion.prompt_ids
        last = trajectory.turns[-1]
        # The completion of an episode at its token limit has the finish reason `length`, even if its last turn ended otherwise.
        turn = attrs.evolve(completion, finish_reason=last.finish_reason)
        # Messages observed after the last turn have no tokens yet, except assistant messages: their text continued the turn.
        shown = [m for m in last.observed if m["role"] != "assistant"]
        ids = self._encoder.after(
            [{"role": "user", "content": text}],
            [*shown, {"role": "user", "content": text}],
            calls=last.calls,
            ended_by=ended_by(turn, request.sampling, self._encoder),
        )
        return np.concatenate([begin, completion.response_ids, np.array(ids, np.int64)])

    def _text(self, ids_T: np.ndarray) -> str:
        return str(self._tokenizer.decode(ids_T.tolist(), skip_special_tokens=True))

    def _failed(self, error: Exception) -> Failure:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
        message = f"agent loop {self._loop.name!r} raised {error_text(error)} ({where})"
        return Failure(kind=FailureKind.HARNESS, message=message)


@contextmanager
def running_episodes(
    config: RunConfig, context: PluginContext, logger: Logger
) -> Iterator[Episodes | None]:
    """Start the agent loop of a config, and close the loop after the block; yields None if a sample is one response to the prompt.

    Raises:
        ConfigError: the chat template does not render the loop's observations, or changes earlier turns although the config forbids it.
    """
    with _started(config, context) as loop:
        if loop.one_response:
            yield None
            return
        tools = loop.chat_tools()
        _check_template(loop, TurnEncoder(context.tokenizer, tools), logger)
        yield Episodes(loop, context.tokenizer, tools, config.data.control_tokens)


def chat_tools(config: RunConfig, tokenizer: Tokenizer) -> Sequence[Mapping[str, Any]] | None:
    """Return the functions that the chat template describes in every prompt; None if a sample is one response to the prompt."""
    context = PluginContext(seed=config.seed, tokenizer=tokenizer, model=config.model)
    with _started(config, context) as loop:
        return None if loop.one_response else tuple(loop.chat_tools())


@contextmanager
def _started(config: RunConfig, context: PluginContext) -> Iterator[AgentLoop]:
    section = config.rollout.agent_loop or PluginSection(name="single_turn")
    loop: Any = make_plugin(ref_for("agent_loop", section), context)
    try:
        loop.start()
        yield loop
    finally:
        loop.close()


def _check_template(loop: AgentLoop, encoder: TurnEncoder, logger: Logger) -> None:
    """Try the chat template on the loop's kinds of observations.

    Raises:
        ConfigError: the template does not render an observation, or changes earlier turns although the config forbids it.
    """
    found = observed_transitions(encoder, loop.transitions)
    if missing := not_rendered(found, loop.transitions):
        raise ConfigError(
            f"the chat template does not render the messages that agent loop {loop.name!r} adds between turns: {missing}",
            hint=OTHER_TEMPLATE,
        )
    if not (what := history_changes(found)):
        return
    chosen = loop.config.on_history_change if isinstance(loop.config, EpisodeSection) else "keep"
    if chosen == "refuse":
        raise ConfigError(
            f"{what}; {_KEY}.on_history_change=refuse does not allow this",
            hint=f"set {_KEY}.on_history_change=keep, so that the policy sees its turns as it produced them, "
            "or =fork, so that a new sequence begins with the conversation rendered again; or set model.chat_template to a template that keeps earlier turns",
        )
    logger.info(f"{what}. {CHOICES[chosen]} ({_KEY}.on_history_change={chosen})")
