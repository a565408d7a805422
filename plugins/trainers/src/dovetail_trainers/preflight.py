"""A preflight rule against training on samples of older weights without a bound on the ratio to the policy that generated them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces import Finding
from dovetail_trainers.config import StreamingConfig

WIDE = 10.0
"""A policy loss with `clip_high` of at least this size counts as one that does not clip."""


def streaming_unsound(config: Any, plan: Any) -> Iterator[Finding]:
    """Report an error if the trainer `streaming` trains on stale samples without a bound on the importance ratio.

    An `on_sync` that contradicts the rollout's settings is an error, too; one that makes `over_sampling` useless is a warning.

    The ratio to the policy that generated the samples is bounded by a rollout correction (weights with an upper bound, or rejection),
    or by a loss that clips this ratio. If a step has several updates, the loss must clip in either case.
    """
    trainer = config.trainer
    if not isinstance(trainer, StreamingConfig) or not trainer.steps_behind:
        return
    yield from _on_sync(trainer, config.rollout, plan)
    if plan is None or config.actor.objective is not None:
        return
    selected = plan.facts.plugins
    correction = selected.get("algorithm.rollout_correction")
    mode = "disabled" if correction is None else correction.cls.mode(correction.config)
    corrects = mode != "disabled"
    if corrects and not hasattr(correction.config, "weights"):
        return  # of another package, whose bounds are unknown
    weighs = corrects and correction.config.weights is not None
    rejects = corrects and bool(correction.config.reject)
    old = f"trainer.name = streaming trains on samples that are up to {trainer.steps_behind} step(s) old"
    if weighs and correction.config.weight_upper is None and not rejects:
        yield Finding.error(
            f"{old}, but algorithm.rollout_correction.weight_upper = null leaves the importance weights unbounded",
            hint="set algorithm.rollout_correction.weight_upper=2.0",
        )
    if mode == "decoupled" and not weighs and not rejects:
        yield Finding.error(
            f"{old}, but algorithm.rollout_correction has neither `weights` nor `reject`, so it corrects nothing",
            hint="set algorithm.rollout_correction.weights=token",
        )
    if (weighs or mode == "decoupled") and plan.facts.updates_per_step == 1:
        return
    yield from _unclipped(config, selected["algorithm.policy_loss"], old)


def _on_sync(trainer: StreamingConfig, rollout: Any, plan: Any) -> Iterator[Finding]:
    for key, expected in trainer.settings()["rollout"].items():
        if (found := getattr(rollout, key)) != expected:
            yield Finding.error(
                f"rollout.{key} = {str(found).lower()} contradicts trainer.on_sync = {trainer.on_sync}, which sets rollout.{key} itself",
                hint=f"leave rollout.{key} out",
            )
    if trainer.over_sampling is not None and trainer.on_sync == "drain":
        yield Finding.warning(
            f"trainer.over_sampling = {trainer.over_sampling:g} has no benefit with trainer.on_sync = drain: every "
            "publication of weights waits for all responses under way",
            hint="set trainer.on_sync=abort (or keep), or leave trainer.over_sampling out",
        )
    if plan is not None and trainer.on_sync == "keep":
        problem = rollout.cache_problem()
        if "keeps_cache" not in plan.facts.plugins["rollout"].cls.capabilities:
            problem = "can't keep the keys and values of running requests over a weight update (capability keeps_cache)"
        if problem is not None:
            yield Finding.error(
                f"trainer.on_sync = keep is not possible: rollout {rollout.name!r} {problem}",
                hint="set trainer.on_sync=abort: responses then continue from their tokens, with newly computed keys and values",
            )


def _unclipped(config: Any, loss: Any, old: str) -> Iterator[Finding]:
    fix = "set algorithm.policy_loss=ppo_clip and algorithm.rollout_correction=decoupled_token_is"
    clip_high = getattr(loss.config, "clip_high", None)
    if not loss.cls.requires(loss.config) & {"old_log_probs", "rollout_log_probs"}:
        yield Finding.error(
            f"{old}, but algorithm.policy_loss = {loss.ref.name} does not clip a ratio to an older policy",
            hint=fix,
        )
    elif config.actor.max_kl is None and isinstance(clip_high, int | float) and clip_high >= WIDE:
        yield Finding.error(
            f"{old}, but algorithm.policy_loss.clip_high = {clip_high:g} clips nothing in practice",
            hint="set algorithm.policy_loss.clip_high=0.2",
        )
