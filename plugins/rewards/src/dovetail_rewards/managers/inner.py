"""InnerManager: a reward manager inside another manager; its invalid answers become failures."""

from __future__ import annotations

from typing import Any, cast

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginContext,
    PluginRef,
    RewardManager,
    RunningTime,
    Sample,
    Score,
)
from dovetail.plugins import load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_rewards.managers.places import Places
from dovetail_rollouts import finite_float

NAIVE = PluginSection(name="naive")
"""Config of the inner manager that `hybrid` and `remote` use if the option `manager` is not set."""


def manager_class(section: PluginSection) -> type[RewardManager]:
    """Return the reward manager class that a config section selects.

    Raises:
        PluginError: the class can't be loaded.
    """
    return cast("type[RewardManager]", load_plugin_class(ref_for("reward_manager", section)))


class InnerManager:
    """A reward manager that another manager contains, with a capacity limit; invalid results and exceptions become Failures.

    Args:
        manager: the started reward manager.
    """

    def __init__(self, manager: RewardManager) -> None:
        self.manager = manager
        capacity = None if manager.queues else manager.capacity
        self._places = None if capacity is None else Places(capacity)

    @classmethod
    def open(cls, ref: PluginRef, context: PluginContext, key: str, outer: str) -> InnerManager:
        """Construct and start the inner manager.

        Args:
            ref: the reference to the manager's class and config.
            context: what the manager gets from the run, such as its reward functions and its logger.
            key: the config key that selects the manager, for messages.
            outer: the outer manager, for messages.

        Raises:
            ConfigError: the manager scores whole groups.
            DovetailError: the manager can't be loaded or started.
        """
        manager: Any = make_plugin(ref, context)
        if manager.unit != "sample":
            raise ConfigError(
                f"{key}={type(manager).name} scores whole groups, but reward manager {outer!r} needs a manager that scores single samples",
                hint=f"set {key} to another manager, such as naive",
            )
        try:
            manager.start()
        except BaseException:
            manager.close()
            raise
        return cls(manager)

    async def score(self, sample: Sample, time: RunningTime) -> Outcome:
        """Return the score or the failure of a sample; waiting for free capacity does not count as running time."""
        if self._places is None:
            return await self._ask(sample, time)
        async with self._places.one(time):
            return await self._ask(sample, time)

    async def _ask(self, sample: Sample, time: RunningTime) -> Outcome:
        try:
            (outcome,) = await self.manager.score([sample], time)
        except Exception as error:  # noqa: BLE001 - a manager may raise anything
            return self._broken(f"raised {type(error).__name__}: {error}")
        if isinstance(outcome, Failure):
            return outcome
        figures = (
            (outcome.value, *outcome.components.values()) if isinstance(outcome, Score) else ()
        )
        if not figures or any(finite_float(figure) is None for figure in figures):
            return self._broken(
                f"returned {outcome!r:.80}; expected a Score of finite numbers or a Failure"
            )
        return outcome

    def _broken(self, what: str) -> Failure:
        message = f"reward manager {type(self.manager).name!r} {what}"
        return Failure(kind=FailureKind.CRASH, message=message, retryable=True)
