"""What a run is made of: its data, and everything that a flow works with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.experience.rollout_pool import RolloutPool
from dovetail.interfaces.plugin import Plugin
from dovetail.interfaces.runtime import Runtime
from dovetail.planning.plan import Plan
from dovetail.run.broadcast import Trackers
from dovetail.sections import RunConfig

if TYPE_CHECKING:
    from dovetail.checkpoint.store import CheckpointStore
    from dovetail.data.ledger import Ledger
    from dovetail.data.loader import Issued, PromptLoader
    from dovetail.data.prompts import PromptSet
    from dovetail.hooks import Observers
    from dovetail.interfaces.advantage import AdvantageEstimator
    from dovetail.interfaces.kl_controller import KlController
    from dovetail.interfaces.reward import RewardManager
    from dovetail.interfaces.rollout_correction import RolloutCorrection
    from dovetail.interfaces.sample_filter import SampleFilter
    from dovetail.interfaces.trainer import Trainer
    from dovetail.telemetry.run_directory import RunDirectory
    from dovetail.telemetry.timers import Timers


@attrs.frozen(kw_only=True, eq=False)
class Data:
    """Tokenizer and prompts."""

    tokenizer: Any
    train: PromptSet
    val: PromptSet | None

    @property
    def has_images(self) -> bool:
        """Whether a prompt has an image, to train on or held out."""
        return any(prompts is not None and prompts.has_images for prompts in (self.train, self.val))


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """Everything that a flow works with."""

    config: RunConfig
    plan: Plan
    run_directory: RunDirectory
    tokenizer: Any
    ledger: Ledger
    loader: PromptLoader
    val_prompts: list[Issued]
    actor: Any
    """Worker group of the actor."""
    critic: Any
    """Worker group of the critic; None where nothing requires it."""
    ref: Any
    """Worker group of the reference policy; None where nothing requires it."""
    trainer: Trainer
    pool: RolloutPool
    manager: RewardManager
    estimator: AdvantageEstimator
    filters: Mapping[str, SampleFilter]
    """Sample filters by name, in the order in which they are applied."""
    correction: RolloutCorrection | None
    """The rollout correction, where it is worked out before the update."""
    kl_controllers: Mapping[str, KlController]
    """What moves the KL weights: `in_loss`, `in_reward`."""
    trackers: Trackers
    observers: Observers
    store: CheckpointStore
    timers: Timers
    logger: Any
    runtime: Runtime
    started: ExitStack
    """Closes what was started, the latest first."""

    def stateful(self) -> dict[str, Plugin]:
        """Plugins on the controller whose state a checkpoint keeps, by name."""
        plugins: dict[str, Plugin | None] = {
            "trainer": self.trainer,
            "estimator": self.estimator,
            "reward_manager": self.manager,
            "rollout_correction": self.correction,
        }
        plugins |= {f"kl_controller.{place}": c for place, c in self.kl_controllers.items()}
        plugins |= {f"sample_filter.{name}": f for name, f in self.filters.items()}
        return {name: plugin for name, plugin in plugins.items() if plugin is not None}

    def trained(self) -> dict[str, Any]:
        """The worker groups whose weights change, by role."""
        groups = {"actor": self.actor, "critic": self.critic}
        return {role: group for role, group in groups.items() if group is not None}

    def close(self) -> None:
        """Stop everything that was started, in the reverse order, even where one part fails."""
        self.started.close()
