"""Who requires which column of a step, who can provide it, and what follows for the passes before an update."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from dovetail.batch.columns import glossary
from dovetail.errors import PlanError, nearest
from dovetail.planning.counts import Counts
from dovetail.planning.resolved_plugins import Chosen
from dovetail.sections import RunConfig

ROLLOUT_COLUMNS = frozenset(
    [
        "sample_id",
        "epoch",
        "prompt_id",
        "attempt",
        "sample_index",
        "group_id",
        "trajectory_id",
        "prompt_ids",
        "response_ids",
        "response_mask",
        "token_weight_versions",
        "finish_reason",
        "temperature",
    ]
)
"""What every rollout gives without being asked."""
ROLLOUT_ON_REQUEST = {"rollout_log_probs": "logprobs", "raw_rollout_log_probs": "raw_logprobs"}
"""Columns that cost generation time, and the capability that a rollout engine needs for each."""
REWARD_COLUMNS = frozenset({"scores", "token_rewards", "reward_components"})
"""What scoring gives."""
ADVANTAGE_COLUMNS = frozenset({"advantages", "returns"})
"""What an estimator may give: advantages always, returns where its `provides` names them."""
ACTOR_PASS = {
    "old_log_probs": "log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "entropies": "entropies",
}
"""Columns of the actor's pass before the update, and the engine's output that each comes from."""
VALUE_HEAD = "value_head"
"""The capability of an engine that can train a critic."""


@attrs.frozen(kw_only=True)
class Demands:
    """What the selected plugins require together."""

    columns: Mapping[str, str]
    """Column to who requires it."""
    from_current: bool
    """Old log-probabilities are the current ones: one update a rollout, and nothing reads them before it."""
    bypass: bool
    """Old log-probabilities are the rollout's."""
    correct_before: bool
    """The rollout correction is worked out over the whole batch before the update."""
    correct_within: bool
    """It is worked out in every micro-batch of the update."""
    critic: bool
    """Something requires `values`."""
    ref_from_actor: bool
    """The actor's engine gives `ref_log_probs` itself, with its adapter off."""

    def actor_outputs(self) -> frozenset[str]:
        """What the actor's pass before the update computes; empty where there is none."""
        outputs = {out for column, out in ACTOR_PASS.items() if column in self.columns}
        if self.bypass:
            outputs.discard("log_probs")
        if self.ref_from_actor and "ref_log_probs" in self.columns:
            outputs.add("ref_log_probs")
        return frozenset(outputs)


def find_demands(config: RunConfig, chosen: Mapping[str, Chosen], counts: Counts) -> Demands:
    """Work out who requires what.

    Raises:
        PlanError: something requires what nothing provides; names both sides.
    """
    loss = chosen["algorithm.policy_loss"]
    correction = chosen.get("algorithm.rollout_correction")
    mode = correction.cls.mode(correction.config) if correction else "disabled"
    columns = _before_the_loss(config, chosen)
    one_update = counts.updates_per_step == 1
    prepared: frozenset[str] = loss.cls.prepares(loss.config)
    decoupled = mode == "decoupled"
    must_come_before = decoupled and correction.cls.before_update(correction.config)  # type: ignore[union-attr]
    if correction and decoupled and (must_come_before or not one_update):
        columns.setdefault("old_log_probs", correction.title)
    for column in sorted(prepared):
        columns.setdefault(column, loss.title)
    from_current = one_update and mode != "bypass" and "old_log_probs" not in columns
    for column in sorted(loss.requires()):
        # The current entropies come with the update; so do old log-probabilities that are the current ones.
        if column == "entropies" or (from_current and column == "old_log_probs"):
            continue
        columns.setdefault(column, loss.title)
    critic = "values" in columns
    if critic:
        columns.setdefault("returns", "the critic")
    actor = chosen["actor.engine"]
    demands = Demands(
        columns=columns,
        from_current=from_current and "old_log_probs" in loss.requires(),
        bypass=mode == "bypass",
        correct_before=decoupled and "old_log_probs" in columns,
        correct_within=mode == "bypass" or (decoupled and "old_log_probs" not in columns),
        critic=critic,
        ref_from_actor="ref_log_probs" in actor.provides()
        and config.ref.path is None
        and config.ref.engine is None,
    )
    _check(demands, _offers(chosen, bypass=demands.bypass), chosen)
    return demands


def _before_the_loss(config: RunConfig, chosen: Mapping[str, Chosen]) -> dict[str, str]:
    """Column to who requires it, for everything but the loss."""
    columns: dict[str, str] = {}
    for place, also in (("in_loss", ()), ("in_reward", ("old_log_probs",))):
        kl = getattr(config.algorithm.kl, place)
        if kl is not None and kl.coef:
            for column in ("ref_log_probs", *also):
                columns.setdefault(column, f"algorithm.kl.{place}")
    for path, plugin in chosen.items():
        if path != "algorithm.policy_loss":
            for column in sorted(plugin.requires()):
                columns.setdefault(column, plugin.title)
    return columns


def _offers(chosen: Mapping[str, Chosen], *, bypass: bool) -> dict[str, str]:
    """Column to who can provide it."""
    rollout, actor, estimator = (
        chosen[path] for path in ("rollout", "actor.engine", "algorithm.advantage")
    )
    critic = chosen.get("critic.engine", actor)
    offers = dict.fromkeys(ROLLOUT_COLUMNS, rollout.title)
    for column, capability in ROLLOUT_ON_REQUEST.items():
        if capability in rollout.cls.capabilities:
            offers[column] = rollout.title
    offers |= dict.fromkeys(REWARD_COLUMNS, chosen["reward.manager"].title)
    offers["baseline_scores"] = f"a greedy response of {rollout.title}"
    offers |= dict.fromkeys(
        {"advantages"} | ADVANTAGE_COLUMNS & estimator.provides(), estimator.title
    )
    offers["old_log_probs"] = rollout.title if bypass else "the actor"
    offers |= dict.fromkeys(("entropies", "sum_pi_squared"), "the actor")
    offers["ref_log_probs"] = "the reference policy"
    if VALUE_HEAD in critic.cls.capabilities:
        offers["values"] = critic.title
    for plugin in chosen.values():
        for column in plugin.provides():
            offers.setdefault(column, plugin.title)
    return offers


def _check(demands: Demands, offers: Mapping[str, str], chosen: Mapping[str, Chosen]) -> None:
    known = glossary(column for plugin in chosen.values() for column in plugin.cls.columns)
    for column, who in demands.columns.items():
        if column in offers:
            continue
        if column not in known:
            near = nearest(column, known)
            raise PlanError(
                f"{who} requires the column {column!r}, which no plugin declares",
                hint=f"did its author mean {near!r}?" if near else None,
            )
        raise PlanError(
            f"{who} requires the column {column!r} ({known[column].meaning}), but "
            + _why_not(column, known[column].owner, chosen),
            hint="choose another plugin on one of the two sides",
        )


def _why_not(column: str, owner: str, chosen: Mapping[str, Chosen]) -> str:
    if column in ROLLOUT_ON_REQUEST:
        lacks, capability = chosen["rollout"], ROLLOUT_ON_REQUEST[column]
    elif column == "values":
        lacks = chosen.get("critic.engine", chosen["actor.engine"])
        capability = VALUE_HEAD
    elif column in ADVANTAGE_COLUMNS:
        return f"{chosen['algorithm.advantage'].title} does not provide it"
    else:
        return f"nothing that this config selects provides it (owner: {owner})"
    return f"{lacks.title} lacks the capability {capability!r}"
