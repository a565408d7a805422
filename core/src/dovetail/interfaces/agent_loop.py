"""AgentLoop: how one sample of one prompt comes about, in one turn or in many."""

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
"""Messages that may follow an assistant's turn: the result of one call, the results of several, or a user's message."""


class EpisodeError(DovetailError, RuntimeError):
    """An episode failed for a reason other than the policy's text: it gets no score.

    Args:
        kind: what failed: `FailureKind.TOOL`, `PROVIDER`, `SANDBOX`, `ENVIRONMENT`, `HARNESS` or `LIMIT`.
        message: the description of the failure.
    """

    def __init__(self, kind: FailureKind, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class EpisodeEndedError(DovetailError, RuntimeError):
    """The episode has reached a limit and is scored as it is. An agent loop closes what it opened and re-raises this."""

    def __init__(self, end: EpisodeEnd) -> None:
        super().__init__(f"the episode has reached its limit on {end}")
        self.end = end


class Session(ABC):
    """One sequence of tokens of an episode. Tokens are only ever appended, and never rendered again.

    Attributes:
        prompt: the row of data.
        sample_id: the id of the sample, unique in the step.
        turns: the turns of this session so far.
        counts: the figures that were counted in the episode, by name.
        output: a JSON value that the episode adds to its turns; reward functions find it in the trajectory. The loop
            sets it on the session that `run` received.
    """

    prompt: Prompt
    sample_id: str
    turns: Sequence[Turn]
    counts: dict[str, float]
    output: Any = None

    @property
    @abstractmethod
    def tokens_left(self) -> int:
        """How many tokens this sequence may still get, produced or shown. The limit is on all sequences of the episode together."""

    @abstractmethod
    async def generate(
        self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Turn:
        """Sample a turn of the policy, with the config's sampling parameters, and return it.

        Args:
            max_new_tokens: tokens of this turn at most, besides the limits of the config.
            stop: strings that end the turn, besides those of the config.

        Raises:
            EpisodeEndedError: the episode has reached its limit of turns or tokens.
            RolloutError: every replica failed; this ends the step.
        """

    @abstractmethod
    async def observe(
        self,
        messages: str | Sequence[Message],
        calls: Sequence[MessageCall] = (),
        *,
        produced: Message | None = None,
    ) -> None:
        """Append messages that the policy sees after its turn. A message that is too long is cut as the config says.

        With `on_history_change: fork`, where the chat template now renders the earlier turns differently (white space aside), the session
        continues in a further sequence, whose prompt is the whole conversation rendered again.

        Args:
            messages: the messages, such as `{"role": "tool", "content": …}` for each call, in order.
            calls: the tool calls of the turn before, which some templates refer to.
            produced: the turn before as a message for rendering it again: `content` and `reasoning_content`, without its calls. By
                default the content is the turn's whole text, calls included.

        Raises:
            EpisodeEndedError: the messages and one more token do not fit; nothing is appended.
            EpisodeError: there was no turn before, or the chat template does not accept such messages.
        """

    @abstractmethod
    def reward(self, value: float, turn: int | None = None) -> None:
        """Add a reward to a turn: reward functions find it in the trajectory, and the manager `episode` makes it the sample's score.

        Args:
            value: the finite amount that is added to the turn's reward.
            turn: the number of the turn; by default the latest.
        """

    def completion(self) -> Completion:
        """Return this sequence's tokens so far: `prompt_ids`, int64 [P], None where they are the row's own; the response, T tokens.

        The tokens of a turn are `response_ids[turn.start : turn.stop]`. What was shown after the latest turn is left out.
        """
        raise EpisodeError(FailureKind.HARNESS, f"{type(self).__name__} does not show its tokens")

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Session:
        """Fork with messages, and with functions for this sequence that the chat template describes.

        Args:
            messages: see `fork`.
            tools: JSON schemas in OpenAI's form.

        Raises:
            EpisodeError: as for `fork`.
        """
        raise EpisodeError(FailureKind.HARNESS, f"{type(self).__name__} can't be forked")

    def fork(self, messages: Sequence[Message] | None = None) -> Session:
        """Begin a further sequence of the same trajectory: with a shorter context, or for a part of the task.

        The further sequence is trained on by itself; tokens before its first turn are not trained on in it. The config's limits hold for
        all sequences of the episode together. This sequence may be continued as well.

        Args:
            messages: the further sequence's prompt, rendered by the chat template; by default the tokens of this
                sequence so far.

        Raises:
            EpisodeEndedError: the prompt and one more token do not fit.
            EpisodeError: the class of the agent loop does not have "forks" among its capabilities; or the prompt has images, and
                messages are given; or the chat template does not take them.
        """
        raise EpisodeError(FailureKind.HARNESS, f"{type(self).__name__} can't be forked")

    def count(self, name: str, by: float = 1.0) -> None:
        """Add to a counter of the episode. The metric `episode/NAME` is its mean over a step's episodes, 0 for episodes without it.

        Args:
            name: the counter's name, such as `tool_seconds/search`. A run should have few, so it must not be text that the policy wrote.
            by: the finite amount that is added.

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
    """Runs an episode for each sample. One object serves all samples at once, on one event loop; state of a sample stays in `run`.

    A loop with the capability `forks` calls `Session.fork`, so that a sample may be several sequences.

    With a Config that extends `EpisodeSection`, the user sets the limits of a session; with another, they have their defaults.
    """

    one_response: ClassVar[bool] = False
    """Whether a sample is one response to the prompt: then the samples of a group are one request to the engine, and `run` is not
    called."""
    transitions: ClassVar[frozenset[Transition]] = frozenset()
    """Kinds of messages that the loop observes; a run whose chat template can't render them is refused."""

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        """Return kind and section of every plugin that `config` selects, by key path below that config, for plan and lock."""
        return {}

    def chat_tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the functions that the chat template describes in every prompt, as JSON schemas in OpenAI's form.

        It is called after `start`, and always returns the same.
        """
        return ()

    @abstractmethod
    async def run(self, session: Session) -> None:
        """Run one episode: call `session.generate` at least once.

        Raises:
            EpisodeEndedError: as the session raises it.
            EpisodeError: the episode failed. Any other exception counts as a failure of the kind `harness`.
        """
