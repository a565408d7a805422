"""AgentLoop: generates one sample of one prompt, in one turn or in many."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from dovetail.errors import DovetailError
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.plugin import Plugin, PluginConfig
from dovetail.interfaces.reward import FailureKind
from dovetail.interfaces.rollout import Completion
from dovetail.interfaces.trajectory import EpisodeEnd, Message, MessageCall, Turn
from dovetail.sections import PluginSection

Transition = Literal["tool", "parallel_tools", "user"]
"""Messages that may follow an assistant's turn: the result of one tool call, the results of several tool calls, or a user's message."""


class EpisodeError(DovetailError, RuntimeError):
    """An episode failed for a reason other than the policy's text, so the episode gets no score.

    Args:
        kind: the cause of the failure: `FailureKind.TOOL`, `PROVIDER`, `SANDBOX`, `ENVIRONMENT`, `HARNESS` or `LIMIT`.
        message: the description of the failure.
    """

    def __init__(self, kind: FailureKind, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class EpisodeEndedError(DovetailError, RuntimeError):
    """The episode has reached a limit and is scored as it is. An agent loop releases its resources and re-raises this error."""

    def __init__(self, end: EpisodeEnd) -> None:
        super().__init__(f"the episode has reached its limit of {end}")
        self.end = end


class Session(ABC):
    """A token sequence of an episode. Tokens are only appended, and earlier text is never tokenised again.

    Attributes:
        prompt: the prompt of the episode.
        sample_id: the id of the sample, unique in the step.
        turns: the turns of this session so far.
        counts: the counters of the episode, by name (see `count`).
        output: a JSON value of the episode, which reward functions find in the trajectory. The agent loop sets `output` on
            the session that `run` received.
    """

    prompt: Prompt
    sample_id: str
    turns: Sequence[Turn]
    counts: dict[str, float]
    output: Any = None

    @property
    @abstractmethod
    def tokens_left(self) -> int:
        """Number of tokens that this sequence may still get, from policy or messages. All sequences of the episode share the limit."""

    @abstractmethod
    async def generate(
        self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        """Sample the policy's next turn with the config's sampling parameters, and return the turn.

        Args:
            max_new_tokens: the most tokens of this turn; the config's limits hold too.
            stop: strings that end the turn, in addition to the config's stop strings.

        Raises:
            EpisodeEndedError: the episode has reached its limit of turns or tokens.
            RolloutError: every rollout replica failed; the error ends the step.
        """

    @abstractmethod
    async def observe(
        self,
        messages: str | Sequence[Message],
        calls: Sequence[MessageCall] = (),
        *,
        produced: Message | None = None,
    ) -> None:
        """Append messages that the policy sees after its turn. Long messages are cut as the config says.

        After these messages the chat template may render earlier turns differently, in more than white space. With
        `on_history_change: fork`, the session then continues in a new sequence, whose prompt is the whole conversation rendered again.

        Args:
            messages: the messages, such as `{"role": "tool", "content": …}` for each call, in order.
            calls: the tool calls of the previous turn, which some chat templates refer to.
            produced: the previous turn as a message, for rendering the conversation again: `content` and `reasoning_content`, without
                calls. By default the content is the turn's whole text, calls included.

        Raises:
            EpisodeEndedError: the messages and one more token exceed the token limit; nothing is appended.
            EpisodeError: there is no previous turn, or the chat template does not accept the messages.
        """

    @abstractmethod
    def reward(self, value: float, turn: int | None = None) -> None:
        """Add a reward to a turn. Reward functions find it in the trajectory; the function `episode` scores samples by such rewards.

        Args:
            value: the finite amount to add to the turn's reward.
            turn: the number of the turn, from 0; by default the latest turn.
        """

    def completion(self) -> Completion:
        """Return this sequence's tokens so far: `prompt_ids`, int64 [P], and `response_ids`, int64 [T].

        `prompt_ids` is None if the sequence begins with the row's prompt. The tokens of a turn are
        `response_ids[turn.start : turn.stop]`. Messages shown after the latest turn are left out.
        """
        raise EpisodeError(
            FailureKind.HARNESS, f"{type(self).__name__} returns no tokens: define `completion`"
        )

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Session:
        """Begin a new sequence, as `fork` does, and give the new sequence's chat template other tools.

        Args:
            messages: the new sequence's prompt, see `fork`.
            tools: JSON schemas in OpenAI's form.

        Raises:
            EpisodeError: the session can't be forked, see `fork`.
        """
        raise EpisodeError(
            FailureKind.HARNESS, f"session {type(self).__name__} can't be forked: define `begin`"
        )

    def fork(self, messages: Sequence[Message] | None = None) -> Session:
        """Begin a new sequence of the same trajectory, with a shorter context or for a part of the task.

        The new sequence is trained on by itself, without the tokens before its first turn. All sequences of the episode share the
        config's limits. The session that was forked may continue as well.

        Args:
            messages: the new sequence's prompt, rendered by the chat template; by default the tokens of this
                sequence so far.

        Raises:
            EpisodeEndedError: the prompt and one more token exceed the token limit.
            EpisodeError: the agent loop lacks the capability `forks`, messages are given for a prompt with images, or the chat
                template does not accept the messages.
        """
        raise EpisodeError(
            FailureKind.HARNESS, f"session {type(self).__name__} can't be forked: define `fork`"
        )

    def count(self, name: str, by: float = 1.0) -> None:
        """Add to a counter of the episode. The metric `episode/NAME` is the mean over a step's episodes; a missing counter is 0.

        Args:
            name: the counter's name, such as `tool_seconds/search`. Never use the policy's text, since each name is a metric.
            by: the finite amount to add.

        Raises:
            EpisodeError: the amount is not finite.
        """
        if not math.isfinite(by):
            raise EpisodeError(
                FailureKind.HARNESS,
                f"the counter {name!r} is increased by {by}; expected a finite number",
            )
        self.counts[name] = self.counts.get(name, 0.0) + float(by)


class AgentLoop(Plugin):
    """Runs an episode for each sample.

    One object serves all samples concurrently on one event loop, so keep a sample's state in local variables of `run`. A loop with
    the capability `forks` may call `Session.fork`, so that a sample consists of several sequences.

    If `Config` extends `EpisodeSection`, the user sets the limits of a session; otherwise the limits have their defaults.
    """

    one_response: ClassVar[bool] = False
    """Whether a sample is one response to the prompt. If so, one request to the engine draws all samples of a prompt, and `run` is
    not called."""
    transitions: ClassVar[frozenset[Transition]] = frozenset()
    """Kinds of messages that the loop passes to `Session.observe`; a run whose chat template can't render such messages is refused."""

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        """Return the kind and the config section of every plugin that `config` selects, by key path below `config`.

        The plan of a run and the record of its plugins, `plugins.lock.json`, list these plugins.
        """
        return {}

    def chat_tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the functions that the chat template describes in every prompt, as JSON schemas in OpenAI's form.

        Called after `start`; every call returns the same functions.
        """
        return ()

    @abstractmethod
    async def run(self, session: Session) -> None:
        """Run one episode: call `session.generate` at least once.

        Raises:
            EpisodeEndedError: the episode has reached a limit of turns or tokens.
            EpisodeError: the episode failed. Any other exception is a failure of the kind `harness`.
        """
