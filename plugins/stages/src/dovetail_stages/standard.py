"""Standard: the stages of policy gradients, and of training on examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.batch import Batch
from dovetail.errors import PlanError
from dovetail.interfaces import LocalReduction, ObjectiveSpec, PlanFacts, PluginConfig, StageSet
from dovetail.metrics import values
from dovetail.sections import PluginSection

_STAGES = (
    "old_log_probs_from_rollout",
    "score_actor",
    "score_ref",
    "score_critic",
    "logprob_check",
    "rollout_correction",
    "overlong_penalty",
    "kl_penalty",
    "advantage",
    "update_critic",
    "update_roles",
    "update_actor",
    "follow_actor",
)


class Standard(StageSet):
    """The stages of a step: scores, checks, corrections, penalties, advantages, and the updates of critic, further roles and actor."""

    name = "standard"
    api = ">=1.1,<2"
    Config = PluginSection
    stages = tuple(f"{name}@dovetail-stages" for name in _STAGES)

    @classmethod
    def selects(
        cls, config: PluginConfig, facts: PlanFacts
    ) -> dict[str, tuple[str, PluginSection | None]]:
        run = facts.config
        algorithm = run.algorithm
        policy, value = PluginSection(name="policy"), PluginSection(name="value")
        found: dict[str, tuple[str, PluginSection | None]] = {
            "actor.objective": ("objective", run.actor.objective or policy),
            "critic.objective": ("objective", run.critic.objective or value),
            "critic.loss_aggregation": ("loss_aggregation", run.critic.loss_aggregation),
            "algorithm.preset": ("preset", algorithm.preset),
            "algorithm.advantage": ("advantage", algorithm.advantage),
            "algorithm.policy_loss": ("policy_loss", algorithm.policy_loss),
            "algorithm.loss_aggregation": ("loss_aggregation", algorithm.loss_aggregation),
            "algorithm.rollout_correction": ("rollout_correction", algorithm.rollout_correction),
        }
        for place in ("in_loss", "in_reward"):
            kl = getattr(algorithm.kl, place)
            if kl is not None:
                found[f"algorithm.kl.{place}.controller"] = ("kl_controller", kl.controller)
        return found

    @classmethod
    def run_by_stages(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset(
            ("algorithm.policy_loss", "algorithm.advantage", "algorithm.rollout_correction")
        )

    @classmethod
    def lacks(cls, config: PluginConfig, facts: PlanFacts, column: str) -> str | None:
        if column == "values":
            return f"{facts.engine('critic').title} lacks the capability 'value_head'"
        if column in ("advantages", "returns"):
            return f"{facts.plugins['algorithm.advantage'].title} does not provide it"
        return None

    @classmethod
    def check(cls, config: PluginConfig, facts: PlanFacts, stages: Sequence[Any]) -> None:
        if not estimates(stages):
            return
        estimator, n = facts.plugins["algorithm.advantage"], facts.config.rollout.n
        chosen: Any = estimator.cls
        least = chosen.min_group_size(estimator.config)
        if n < least:
            raise PlanError(
                f"{estimator.title} compares the samples of one prompt and needs at least {least} of "
                f"them, but rollout.n is {n}",
                hint=f"set rollout.n={max(least, 8)}, or choose an estimator that needs no groups, "
                "such as algorithm.advantage=reinforce_plus_plus, or =score, which is the reward itself",
            )

    @classmethod
    def measure(
        cls, spec: ObjectiveSpec, batch: Batch, outputs: Batch, seed: int
    ) -> dict[str, float]:
        import torch

        from dovetail_stages.numerics.deferred import resolve_metrics
        from dovetail_stages.numerics.objective_factory import build_objective, prepare_mini_batch

        goal = build_objective(spec, seed=seed)
        prepared, denominators = prepare_mini_batch(goal, spec, batch, LocalReduction())
        read = {name: torch.from_numpy(outputs[name].values) for name in spec.output_names}
        return values(
            resolve_metrics([goal.term(read, prepared, denominators, spec.scalars).metrics])
        )


def estimates(stages: Iterable[Any]) -> bool:
    """Return whether the estimator's advantages are used.

    True if a stage runs the estimator and no stage overwrites `advantages` without reading them.
    """
    stages = tuple(stages)
    replaced = any("advantages" in stage.rewrites - stage.reads.keys() for stage in stages)
    return not replaced and any(stage.name == "advantage" for stage in stages)
