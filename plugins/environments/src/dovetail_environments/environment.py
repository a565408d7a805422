"""Environment: where tasks come from, how an episode of one runs, and what it scores."""

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
    """What the policy is asked first: messages, or the text of a user's message. Not empty."""
    data: Mapping[str, Any] = attrs.field(factory=dict)
    """What `Environment.run` is given to run it again and again: JSON values."""
    ground_truth: GroundTruth = None
    """The right answer, for samples and reports; any JSON value."""


@attrs.frozen(kw_only=True)
class EpisodeScore:
    """What an episode has earned."""

    reward: float
    """Finite in float32."""
    parts: Mapping[str, float] = attrs.field(factory=dict)
    """Parts of the reward by name, or other figures of the episode, finite: the metric `reward/components/ENVIRONMENT/NAME` is their mean."""


class EnvironmentEpisode(ABC):
    """One episode, as its environment sees it.

    Attributes:
        session: has the policy produce turns, and shows it what the environment says.
    """

    session: Session

    @abstractmethod
    def served(self) -> AbstractAsyncContextManager[ServedModel]:
        """Return a context in which the policy answers calls to the APIs of OpenAI and Anthropic, for an environment that asks by HTTP."""


class Environment(Plugin):
    """Gives tasks, runs an episode of one, and scores it. One object runs all episodes of a run at once, on one event loop.

    `context.role` is the environment's name in the config. `tasks` and `run` may be asked of different objects.
    """

    interface_api: ClassVar[str] = "1.0"
    """The version of this interface."""
    Config: ClassVar[type[PluginSection]] = EnvironmentSection

    @abstractmethod
    def tasks(self, count: int, *, held_out: bool) -> Sequence[EnvironmentTask]:
        """Return tasks, always the same and in the same order: a run is resumed on them.

        Args:
            count: how many at most.
            held_out: whether tasks that no step trains on, none of which is among the others.

        Raises:
            DovetailError: what the environment needs is not there.
        """

    @abstractmethod
    async def run(self, task: Mapping[str, Any], episode: EnvironmentEpisode) -> EpisodeScore:
        """Run one episode, in which the policy produces a turn at least, and score it.

        Args:
            task: `data` of its task.
            episode: its session, and the policy behind an API.

        Raises:
            EpisodeEndedError: as the session raises it; the reward is then `at_limit`.
            EpisodeError: the episode failed, and has no score. Any other exception is a failure `environment`.
        """
