"""The stages of a step and the models behind them, each with the reason why it is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import attrs

from dovetail.dispatch.mesh import Mesh
from dovetail.interfaces.runtime import PluginRef
from dovetail.planning.formatting import clips, shaping_words, update_words, with_settings
from dovetail.planning.requirements import (
    ACTOR_PASS,
    ADVANTAGE_COLUMNS,
    REWARD_COLUMNS,
    ROLLOUT_COLUMNS,
    ROLLOUT_ON_REQUEST,
    Demands,
)
from dovetail.planning.resolved_plugins import Chosen
from dovetail.sections import RunConfig


@attrs.frozen(kw_only=True)
class Stage:
    """One stage of a step, with the reason why it is there."""

    name: str
    who: str
    """The plugin that runs it."""
    provides: frozenset[str] = frozenset()
    because: str


@attrs.frozen(kw_only=True)
class ModelRole:
    """A model that must exist."""

    role: str
    engine: PluginRef
    path: str
    trained: bool
    head: Literal["lm", "value"] = "lm"
    because: str
    mesh: Mesh = attrs.field(factory=Mesh)
    """The ranks of its worker group."""


def stages_of(
    config: RunConfig, chosen: Mapping[str, Chosen], demands: Demands, gate: tuple[str, ...]
) -> Iterator[Stage]:
    """The stages of a step, in order; `gate`: what the gate asks the rollout for, empty where it can't measure."""
    yield from _sampling(config, chosen, demands)
    yield from _scoring(config, chosen, demands, gate)
    engine = chosen["actor.engine"].ref.name
    estimator = chosen["algorithm.advantage"]
    settled = with_settings(estimator, changed_only=True)
    yield Stage(
        name="advantage",
        who=estimator.ref.name,
        provides=frozenset({"advantages"} | ADVANTAGE_COLUMNS & estimator.provides()),
        because="every step" if settled == estimator.ref.name else f"{settled}; every step",
    )
    if demands.critic:
        yield Stage(
            name="update_critic",
            who=f"critic ({_critic_engine(chosen).ref.name})",
            because=f"the critic follows the returns; {_critic_words(config, chosen)}",
        )
    because = f"{update_words(config, chosen, demands)}; every step"
    if config.critic.warmup_steps and demands.critic:
        because += f" after the critic's {config.critic.warmup_steps} steps of warm-up"
    if demands.from_current:
        because += "; one update a rollout, so no pass for old log-probabilities"
        if clips(chosen["algorithm.policy_loss"]):
            because += ": every ratio is 1, and no clip acts"
    if demands.bypass:
        because += "; the rollout policy is the old one, so no pass for old log-probabilities"
    yield Stage(name="update", who=f"actor ({engine})", because=because)
    yield Stage(
        name="weight_sync",
        who=chosen["rollout.weight_transport"].ref.name,
        because="the rollout follows the actor",
    )


def _sampling(config: RunConfig, chosen: Mapping[str, Chosen], demands: Demands) -> Iterator[Stage]:
    """Rollout, rewards, filters."""
    columns, rollout = demands.columns, chosen["rollout"].ref.name
    asked = frozenset(ROLLOUT_ON_REQUEST) & columns.keys()
    yield Stage(
        name="rollout",
        who=rollout,
        provides=ROLLOUT_COLUMNS | asked,
        because="every step" + "".join(f"; {c}: {columns[c]}" for c in sorted(asked)),
    )
    if "baseline_scores" in columns:
        yield Stage(
            name="baseline",
            who=f"{rollout}, greedy",
            provides=frozenset({"baseline_scores"}),
            because=f"required by {columns['baseline_scores']}",
        )
    yield Stage(
        name="reward",
        who=chosen["reward.manager"].ref.name,
        provides=REWARD_COLUMNS,
        because="every step",
    )
    filters = [p.ref.name for path, p in chosen.items() if path.startswith("algorithm.sample_f")]
    if filters:
        rounds = config.algorithm.max_generation_rounds
        again = f"; up to {rounds} rounds of generation" if rounds > 1 else ""
        yield Stage(
            name="filter", who=", ".join(filters), because=f"algorithm.sample_filters{again}"
        )


def _scoring(
    config: RunConfig, chosen: Mapping[str, Chosen], demands: Demands, gate: tuple[str, ...]
) -> Iterator[Stage]:
    """Passes over the finished samples, and what is made of them before advantages."""
    columns = demands.columns
    actor = f"actor ({chosen['actor.engine'].ref.name})"
    outputs = demands.actor_outputs()
    if outputs:
        wanted = actor_columns(outputs)
        reference = ", its adapters off" if "ref_log_probs" in wanted else ""
        also = " for ref_log_probs" if reference and len(wanted) > 1 else ""
        yield Stage(
            name=actor_pass_name(outputs),
            who=f"{actor}{reference}{also}",
            provides=frozenset(wanted),
            because="; ".join(f"{c} required by {columns[c]}" for c in sorted(wanted)),
        )
    if "ref_log_probs" in columns and not demands.ref_from_actor:
        engine = chosen.get("ref.engine", chosen["actor.engine"])
        yield Stage(
            name="ref_log_probs",
            who=f"ref ({engine.ref.name})",
            provides=frozenset({"ref_log_probs"}),
            because=f"required by {columns['ref_log_probs']}",
        )
    if demands.critic:
        yield Stage(
            name="values",
            who=f"critic ({_critic_engine(chosen).ref.name})",
            provides=frozenset({"values"}),
            because=f"required by {columns['values']}",
        )
    if gate:
        every = config.algorithm.gate.every
        often = f"at step 1 and every {every} steps" if every else "with the log-probabilities"
        yield Stage(name="gate", who=actor, because=f"rollout and trainer must agree; {often}")
    correction = chosen.get("algorithm.rollout_correction")
    if correction is not None and demands.correct_before:
        yield Stage(
            name="rollout_correction",
            who=correction.ref.name,
            provides=correction.provides(),
            because="algorithm.rollout_correction",
        )
    shaping = shaping_words(config, chosen)
    if shaping:
        yield Stage(name="shaping", who="rewards", because=shaping)


def actor_columns(outputs: frozenset[str]) -> dict[str, str]:
    """What the actor's pass before the update gives: column → the engine's output that it is."""
    named = {output: column for column, output in ACTOR_PASS.items()}
    return {named.get(output, output): output for output in sorted(outputs)}


def actor_pass_name(outputs: frozenset[str]) -> str:
    """What the actor's pass before the update is called, in the plan and among phases: after the policies that it scores
    with, or else after its first column.
    """
    columns = actor_columns(outputs)
    if {"old_log_probs", "ref_log_probs"} <= columns.keys():
        return "old_and_ref_log_probs"
    return next((c for c in ("old_log_probs", "ref_log_probs") if c in columns), min(columns))


def models_of(
    config: RunConfig, chosen: Mapping[str, Chosen], demands: Demands
) -> Iterator[ModelRole]:
    """The models that must exist: the policy, and what something requires."""
    actor = chosen["actor.engine"].ref
    yield ModelRole(
        role="actor", engine=actor, path=config.model.path, trained=True, because="the policy"
    )
    if demands.critic:
        yield ModelRole(
            role="critic",
            engine=_critic_engine(chosen).ref,
            path=config.critic.path or config.model.path,
            trained=True,
            head="value",
            because=f"{demands.columns['values']} requires values",
        )
    if "ref_log_probs" in demands.columns and not demands.ref_from_actor:
        yield ModelRole(
            role="ref",
            engine=chosen["ref.engine"].ref if "ref.engine" in chosen else actor,
            path=config.ref.path or config.model.path,
            trained=False,
            because=f"{demands.columns['ref_log_probs']} requires ref_log_probs",
        )


def _critic_engine(chosen: Mapping[str, Chosen]) -> Chosen:
    return chosen.get("critic.engine", chosen["actor.engine"])


def _critic_words(config: RunConfig, chosen: Mapping[str, Chosen]) -> str:
    clip = config.critic.value_clip
    bound = "unclipped" if clip is None else f"value_clip {clip:g}"
    return f"{bound}, {with_settings(chosen['critic.loss_aggregation'])}"
