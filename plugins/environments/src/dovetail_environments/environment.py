"""Environment: the interface of plugins that provide tasks, run their episodes, and score them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from dovetail.interfaces import GroundTruth, Message, Plugin, Session
from dovetail.sections import PluginSection
from dovetail_environments.config import EnvironmentSection

if TYPE_CHECKING:
    from dovetail_environments.served import ServedModel


@attrs.frozen(kw_only=True)
class EnvironmentTask:
    """One task of an environment, which becomes a row of the run's data."""

    prompt: str | Sequence[Message]
    """The first prompt to the policy: non-empty messages, or the text of a user message."""
    data: Mapping[str, Any] = attrs.field(factory=dict)
    """The task's data as JSON values, passed to `Environment.run` for each episode of the task."""
    ground_truth: GroundTruth = None
    """The right answer as a JSON value, shown in samples and reports."""


@attrs.frozen(kw_only=True)
class EpisodeScore:
    """The score of an episode."""

    reward: float
    """The reward of the episode, finite in float32."""
    parts: Mapping[str, float] = attrs.field(factory=dict)
    """Parts of the reward or other finite numbers of the episode, by name. The metric `reward/components/ENVIRONMENT/NAME` is the mean
    over episodes.
    """


class EnvironmentEpisode(ABC):
    """The episode that `Environment.run` gets: its token sequence, and the means to call the policy.

    Attributes:
        session: the token sequence of the episode, with methods to generate a turn of the policy and to append messages for the policy.
    """

    session: Session

    @abstractmethod
    def served(self) -> AbstractAsyncContextManager[ServedModel]:
        """Return a context in which the policy answers HTTP calls in the format of OpenAI's or Anthropic's API."""


class Environment(Plugin):
    """Interface of environments, which provide tasks, run episodes and score them.

    One object runs all episodes of a run concurrently, on one event loop. `context.role` is the environment's name in the config.
    `tasks` and `run` may be called on different objects.
    """

    interface_api: ClassVar[str] = "1.0"
    """The version of this interface."""
    Config: ClassVar[type[PluginSection]] = EnvironmentSection

    @abstractmethod
    def tasks(self, count: int, *, held_out: bool) -> Sequence[EnvironmentTask]:
        """Return tasks; every call must return the same tasks in the same order, so that a run can be resumed.

        Args:
            count: the maximum number of tasks.
            held_out: whether to return held-out tasks, which must differ from all training tasks.

        Raises:
            DovetailError: a package or file that the environment needs is missing.
        """

    @abstractmethod
    async def run(self, task: Mapping[str, Any], episode: EnvironmentEpisode) -> EpisodeScore:
        """Run one episode, with at least one turn of the policy, and score it.

        Args:
            task: the `data` of the EnvironmentTask.
            episode: the episode, with its session and the policy's API.

        Raises:
            EpisodeEndedError: the session reached a limit; the reward is then `at_limit`.
            EpisodeError: the episode failed and has no score. Any other exception counts as the failure `environment`.
        """
