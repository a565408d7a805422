"""FollowActor: moves the weights of the models that follow the actor towards the actor's weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from dovetail.batch import Batch
from dovetail.interfaces import PlanFacts, PluginConfig, Stage, StepContext
from dovetail.sections import FollowSection


class FollowActor(Stage):
    """Moves the weights w of each model that follows the actor, after the actor's updates: w ← decay · w + (1 − decay) · w_actor.

    The config sets decay and period for each model; decay 0 copies the actor's weights (TR-DPO, arXiv 2404.09656). Weights are passed
    in sharded float32 files below the run directory, which every rank of the actor and of the other role must be able to read.
    """

    name = "follow_actor"
    api = ">=1.0,<2"
    phase = "update"
    after = ("update_critic", "update_roles", "update_actor")

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        return "; ".join(f"{role} {f}" for role, f in cls.follows(config, facts).items()) or None

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        return ("actor", *cls.follows(config, facts))

    @classmethod
    def follows(cls, config: PluginConfig, facts: PlanFacts) -> dict[str, FollowSection]:
        """Return, for each role whose weights follow the actor's, its config section with decay and period.

        The reference is left out if nothing requires its log-probabilities.
        """
        own = facts.config
        found = {role: s.update for role, s in own.roles.items() if s.update is not None}
        if own.ref.update is not None and "ref_log_probs" in facts.required:
            found["ref"] = own.ref.update
        return found

    def skips(self, batch: Batch, step: StepContext) -> bool:
        return not any(self._due(step))

    def run(self, batch: Batch, step: StepContext) -> Batch:
        directory = self.context.run_directory
        assert directory is not None
        place = directory / "actor_weights"
        try:
            step.roles["actor"].write_weights(place).result()
            for role, follow in self._due(step):
                step.roles[role].average_weights(place, 1 - follow.decay).result()
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return batch

    def _due(self, step: StepContext) -> Iterator[tuple[str, FollowSection]]:
        """Yield the roles whose weights move in this step, each with its config section: those whose period divides the step's number."""
        for role, follow in self.follows(self.config, step.facts).items():
            if step.number % follow.every == 0:
                yield role, follow
