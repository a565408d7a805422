"""A conversation with a model: responses to the whole conversation so far, or episodes of the config's agent loop."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from dovetail.errors import ModelError, RequestRefusedError
from dovetail.interfaces import (
    AgentLoop,
    EpisodeEnd,
    Failure,
    Message,
    PluginContext,
    Prompt,
    RolloutRequest,
    Sample,
    Tokenizer,
    Turn,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import RunConfig
from dovetail_datasets import check_template, read_tokenizer
from dovetail_inference.generation import answer, run_episodes
from dovetail_inference.models import find_model, serving
from dovetail_rollouts import Episodes, RolloutPool, TurnEncoder, training_sampling


class Conversation(ABC):
    """A conversation of a user with a model.

    Args:
        config: the config, with the sampling parameters.
        tokenizer: a tokenizer with a chat template.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        check_template(tokenizer, config.model)
        self._tokenizer = tokenizer
        self._seed, self._sampling = config.seed, training_sampling(config)
        self._replies = 0

    async def reply(self, pool: RolloutPool, text: str) -> str:
        """Return the model's answer to a text; text and answer become part of the conversation.

        Raises:
            RequestRefusedError: the conversation with an answer is longer than the model's context.
        """
        try:
            return await self._reply(pool, text)
        except RequestRefusedError as error:
            error.hint = error.hint or "begin a new conversation, or lower data.max_response_length"
            raise

    @abstractmethod
    async def _reply(self, pool: RolloutPool, text: str) -> str:
        """Return the model's answer to a text; subclasses implement this method, which `reply` calls."""

    def _request(self, prompt_ids: np.ndarray) -> RolloutRequest:
        number, self._replies = self._replies, self._replies + 1
        stream = SampleStream(
            seed=self._seed, purpose="chat", epoch=0, prompt=number, sample=0, attempt=0
        )
        return RolloutRequest(
            request_id=f"chat.{number}",
            prompt_ids=prompt_ids,
            sampling=self._sampling,
            streams=(stream,),
        )


class RenderedConversation(Conversation):
    """A conversation in which each answer is one response to all messages so far, rendered by the chat template."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._encoder = TurnEncoder(tokenizer, control_tokens=config.data.control_tokens)
        self._messages: list[dict[str, str]] = []

    async def _reply(self, pool: RolloutPool, text: str) -> str:
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = self._encoder.encode(self._encoder.render(messages, generate=True))
        [completion] = await answer(pool, self._request(np.array(ids, np.int64)))
        ids_T = completion.response_ids.tolist()
        found = str(self._tokenizer.decode(ids_T, skip_special_tokens=True))
        self._messages = [*messages, {"role": "assistant", "content": found}]
        return found


class EpisodeConversation(Conversation):
    """A conversation in which each answer is an episode with its own limits. An episode begins with the tokens of the earlier episodes,
    except failed episodes.

    Args:
        config: the config, with the sampling parameters.
        tokenizer: a tokenizer with a chat template.
        episodes: runs episodes of the config's agent loop.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, episodes: Episodes) -> None:
        super().__init__(config, tokenizer)
        self._episodes = episodes
        self._latest: tuple[RolloutRequest, Sample] | None = None

    async def episode(self, pool: RolloutPool, messages: Sequence[Message]) -> Sample:
        """Run an episode on messages, outside the conversation, and return its sample. Several such episodes may run concurrently."""
        ids_P = self._episodes.first_prompt(messages)
        prompt = Prompt(index=0, prompt_ids=ids_P, raw=list(messages))
        [sample] = await run_episodes(pool, self._episodes, self._request(ids_P), prompt)
        return sample

    async def _reply(self, pool: RolloutPool, text: str) -> str:
        raw = [{"role": "user", "content": text}]
        try:
            if self._latest is None:
                ids_P = self._episodes.first_prompt(raw)
            else:
                ids_P = self._episodes.next_prompt(*self._latest, text)
        except Exception as error:
            raise ModelError(
                f"the chat template can't render the user's next message: {type(error).__name__}: {error}",
                hint="set model.chat_template to a template that accepts this conversation, or begin a new one",
            ) from error
        request = self._request(ids_P)
        prompt = Prompt(index=0, prompt_ids=ids_P, raw=raw)
        [sample] = await run_episodes(pool, self._episodes, request, prompt)
        if sample.outcome is None:
            self._latest = request, sample
        return _shown(sample)


def _shown(sample: Sample) -> str:
    """Return an episode as text: its turns, each followed by its calls and the observations."""
    trajectory, outcome = sample.trajectory, sample.outcome
    turns = () if trajectory is None else trajectory.turns
    lines = [line for turn in turns for line in _turn(turn)]
    if isinstance(outcome, Failure):
        lines.append(f"[failed: {outcome.kind}] {outcome.message}")
    elif trajectory is not None and trajectory.end is not EpisodeEnd.DONE:
        lines.append(f"[ended at the limit on {trajectory.end}]")
    return "\n".join(lines)


def _turn(turn: Turn) -> list[str]:
    calls = [
        f"[call] {call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})"
        for call in turn.calls
    ]
    shown = [f"[{message['role']}] {message['content']}" for message in turn.observed]
    return [turn.text, *calls, *shown]


@contextmanager
def open_model(
    model: str,
    overrides: Sequence[str] = (),
    *,
    config: Path | None = None,
    loop: Callable[[RunConfig, PluginContext], AgentLoop],
) -> Iterator[Callable[[Sequence[Message]], Awaitable[Sample]]]:
    """Start replicas that serve a model to an agent loop, and close them after the block.

    Args:
        model: the model, as for `dovetail generate`: a run, RUN@STEP, a directory in Hugging Face format, or a hub id.
        overrides: `key=value` overrides of the config.
        config: the config file to use instead of the run's own config.
        loop: a function that makes the agent loop from the config and the context of plugins.

    Yields:
        A function that runs an episode of the agent loop on messages. Await all calls of the function on one event loop.

    Raises:
        DovetailError: the model does not exist, or an engine could not start.
    """
    source = find_model(model)
    settings = source.load_config(config, overrides).config
    tokenizer = read_tokenizer(settings)
    with (
        source.on_disk(settings) as section,
        serving(settings, section, tokenizer) as (pool, context),
        closing(loop(settings, context)) as made,
    ):
        made.start()
        episodes = Episodes(made, tokenizer, made.chat_tools(), settings.data.control_tokens)
        runner = EpisodeConversation(settings, tokenizer, episodes)
        yield partial(runner.episode, pool)
