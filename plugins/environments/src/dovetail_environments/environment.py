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
    """One task of an environment: a row of the run's data."""

    prompt: str | Sequence[Message]
    """The first prompt to the policy: messages, or the text of a user message. Not empty."""
    data: Mapping[str, Any] = attrs.field(factory=dict)
    """The task as `Environment.run` gets it, as often as the task is run: JSON values."""
    ground_truth: GroundTruth = None
    """The right answer, for samples and reports; any JSON value."""


@attrs.frozen(kw_only=True)
class EpisodeScore:
    """The score of an episode."""

    reward: float
    """The reward of the episode, finite in float32."""
    parts: Mapping[str, float] = attrs.field(factory=dict)
    """Parts of the reward by name, or other figures of the episode, finite: the metric `reward/components/ENVIRONMENT/NAME` is their mean."""


class EnvironmentEpisode(ABC):
    """One episode, with what its environment may use.

    Attributes:
        session: the session, through which the policy produces turns and sees the environment's messages.
    """

    session: Session

    @abstractmethod
    def served(self) -> AbstractAsyncContextManager[ServedModel]:
        """Return a context in which the policy answers calls to the APIs of OpenAI and Anthropic, for environments that call by HTTP."""


class Environment(Plugin):
    """Provides tasks, runs episodes and scores them. One object runs all episodes of a run concurrently, on one event loop.

    `context.role` is the environment's name in the config. `tasks` and `run` may be called on different objects.
    """

    interface_api: ClassVar[str] = "1.0"
    """The version of this interface."""
    Config: ClassVar[type[PluginSection]] = EnvironmentSection

    @abstractmethod
    def tasks(self, count: int, *, held_out: bool) -> Sequence[EnvironmentTask]:
        """Return tasks, the same at every call and in the same order, so that a run can be resumed.

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
            task: `data` of its task.
            episode: the episode, with its session and the policy behind an API.

        Raises:
            EpisodeEndedError: raised by the session at a limit; the reward is then `at_limit`.
            EpisodeError: the episode failed, and has no score. Any other exception counts as the failure `environment`.
        """
