"""The plan of a step: which stages and models it needs, from what the chosen plugins require and provide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.batch.columns import glossary
from dovetail.config.sections import PluginSection, RunConfig
from dovetail.errors import PlanError, nearest
from dovetail.flow.counts import Counts, count
from dovetail.interfaces.objective import KlTerm, ObjectiveSpec
from dovetail.interfaces.plugin import Plugin
from dovetail.interfaces.runtime import PluginRef

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
"""Columns that cost generation time, and the capability that an engine needs for each."""
REWARD_COLUMNS = frozenset({"scores", "token_rewards", "reward_components"})
"""What scoring gives."""
ADVANTAGE_COLUMNS = frozenset({"advantages", "returns"})
"""What an estimator gives."""


@attrs.frozen(kw_only=True)
class Stage:
    """One stage of a step, with the reason why it is there."""

    name: str
    who: str
    """The plugin that runs it."""
    provides: frozenset[str]
    because: str


@attrs.frozen(kw_only=True)
class ModelRole:
    """A model that must exist."""

    role: str
    engine: PluginRef
    path: str
    trained: bool
    because: str


@attrs.frozen(kw_only=True)
class Plan:
    """Everything decided before a run starts."""

    stages: tuple[Stage, ...]
    models: tuple[ModelRole, ...]
    refs: Mapping[str, PluginRef]
    """The chosen plugin of each config section, by its key path."""
    counts: Counts
    rollout_log_probs: bool
    """Whether the rollout is asked for log-probabilities under the sampler."""
    raw_rollout_log_probs: bool
    objective: ObjectiveSpec

    def has_stage(self, name: str) -> bool:
        """Whether a step runs this stage."""
        return any(stage.name == name for stage in self.stages)


@attrs.frozen
class _Chosen:
    """A plugin that the config selects: its reference, class and config."""

    path: str
    ref: PluginRef
    cls: type[Plugin]
    config: PluginSection

    @property
    def title(self) -> str:
        return f"{self.ref.kind.replace('_', ' ')} {self.ref.name!r} ({self.path})"


def make_plan(config: RunConfig, *, prompts: int | None = None) -> Plan:
    """Work out the stages, models and counts of a run.

    Args:
        config: the whole config.
        prompts: training prompts after filtering; None where the data has not been read.

    Raises:
        PlanError: a requirement that nothing meets, or counts that do not fit. Names both sides.
    """
    chosen = _chosen(config)
    counts = count(config, prompts)
    estimator, loss = chosen["algorithm.advantage"], chosen["algorithm.policy_loss"]
    _check_group_size(config, estimator)

    demands = _demands(config, chosen)
    from_current = counts.updates_per_step == 1 and demands.get("old_log_probs") == loss.title
    if from_current:
        demands.pop("old_log_probs")
    offers = _offers(chosen)
    _check_demands(demands, offers, chosen)
    kl = config.algorithm.kl.in_loss
    objective = ObjectiveSpec(
        policy_loss=loss.ref,
        loss_aggregation=chosen["algorithm.loss_aggregation"].ref,
        kl=KlTerm(estimator=kl.estimator, coef=kl.coef) if kl and kl.coef else None,
        entropy_coef=config.algorithm.entropy.coef,
        measure_entropy=config.algorithm.entropy.measure,
        old_log_probs_from_current=from_current,
        requires=(loss.cls.requires(loss.config) | ({"ref_log_probs"} if kl and kl.coef else set()))
        - ({"old_log_probs"} if from_current else set()),
    )
    return Plan(
        stages=_stages(demands, chosen, from_current=from_current),
        models=_models(config, chosen, demands),
        refs={path: plugin.ref for path, plugin in chosen.items()},
        counts=counts,
        rollout_log_probs="rollout_log_probs" in demands,
        raw_rollout_log_probs="raw_rollout_log_probs" in demands,
        objective=objective,
    )


def _chosen(config: RunConfig) -> dict[str, _Chosen]:
    """Resolve and import every plugin that the config selects."""
    from dovetail.plugins.load import load_class, ref_for

    sections: dict[str, tuple[str, PluginSection | None]] = {
        "rollout": ("rollout", config.rollout),
        "rollout.weight_transport": ("weight_transport", config.rollout.weight_transport),
        "actor.engine": ("engine", config.actor.engine),
        "ref.engine": ("engine", config.ref.engine),
        "algorithm.advantage": ("advantage", config.algorithm.advantage),
        "algorithm.policy_loss": ("policy_loss", config.algorithm.policy_loss),
        "algorithm.loss_aggregation": ("loss_aggregation", config.algorithm.loss_aggregation),
        "reward.manager": ("reward_manager", config.reward.manager),
        "trainer": ("trainer", config.trainer),
        "runtime": ("runtime", config.runtime),
        "data.source": ("dataset", config.data.source),
        "data.sampler": ("sampler", config.data.sampler),
    }
    if config.algorithm.kl.in_loss is not None:
        controller = config.algorithm.kl.in_loss.controller
        sections["algorithm.kl.in_loss.controller"] = ("kl_controller", controller)
    for i, tracker in enumerate(config.tracking):
        sections[f"tracking[{i}]"] = ("tracker", tracker)
    chosen = {}
    for path, (kind, section) in sections.items():
        if section is None:
            continue
        ref = ref_for(kind, section)
        chosen[path] = _Chosen(path, ref, load_class(ref), section)
    return chosen


def _check_group_size(config: RunConfig, estimator: _Chosen) -> None:
    cls: Any = estimator.cls
    least = cls.min_group_size(estimator.config)
    if config.rollout.n < least:
        raise PlanError(
            f"{estimator.title} compares the samples of one prompt and needs at least {least} of "
            f"them, but rollout.n is {config.rollout.n}",
            hint=f"set rollout.n={max(least, 8)}, or choose an estimator that needs no groups, "
            "such as algorithm.advantage=reinforce_plus_plus",
        )


def _demands(config: RunConfig, chosen: Mapping[str, _Chosen]) -> dict[str, str]:
    """Column → who requires it (the loss last, so that a demand of another's is seen first)."""
    demands: dict[str, str] = {}
    kl = config.algorithm.kl.in_loss
    if kl is not None and kl.coef:
        demands["ref_log_probs"] = "algorithm.kl.in_loss"
    last = "algorithm.policy_loss"
    for path in [*(p for p in chosen if p != last), last]:
        for column in sorted(chosen[path].cls.requires(chosen[path].config)):
            demands.setdefault(column, chosen[path].title)
    return demands


def _offers(chosen: Mapping[str, _Chosen]) -> dict[str, str]:
    """Column → who can provide it."""
    rollout = chosen["rollout"]
    offers = dict.fromkeys(ROLLOUT_COLUMNS, rollout.title)
    for column, capability in ROLLOUT_ON_REQUEST.items():
        if capability in rollout.cls.capabilities:
            offers[column] = rollout.title
    offers |= dict.fromkeys(REWARD_COLUMNS, chosen["reward.manager"].title)
    offers |= dict.fromkeys(ADVANTAGE_COLUMNS, chosen["algorithm.advantage"].title)
    offers |= {"old_log_probs": "the actor", "ref_log_probs": "the reference policy"}
    for plugin in chosen.values():
        for column in plugin.cls.provides(plugin.config):
            offers.setdefault(column, plugin.title)
    return offers


def _check_demands(
    demands: Mapping[str, str], offers: Mapping[str, str], chosen: Mapping[str, _Chosen]
) -> None:
    known = glossary(column for plugin in chosen.values() for column in plugin.cls.columns)
    for column, who in demands.items():
        if column in offers:
            continue
        if column not in known:
            near = nearest(column, known)
            raise PlanError(
                f"{who} requires the column {column!r}, which no plugin declares",
                hint=f"did its author mean {near!r}?" if near else None,
            )
        capability = ROLLOUT_ON_REQUEST.get(column)
        reason = (
            f"{chosen['rollout'].title} lacks the capability {capability!r}"
            if capability
            else f"nothing that this config selects provides it (owner: {known[column].owner})"
        )
        raise PlanError(
            f"{who} requires the column {column!r} ({known[column].meaning}), but {reason}",
            hint="choose another plugin on one of the two sides",
        )


def _stages(
    demands: Mapping[str, str], chosen: Mapping[str, _Chosen], *, from_current: bool
) -> tuple[Stage, ...]:
    rollout, reward = chosen["rollout"], chosen["reward.manager"]
    engine = chosen["actor.engine"].ref.name
    asked = frozenset(ROLLOUT_ON_REQUEST) & demands.keys()
    stages = [
        Stage(
            name="rollout",
            who=rollout.ref.name,
            provides=ROLLOUT_COLUMNS | asked,
            because="every step" + "".join(f"; {c}: {demands[c]}" for c in sorted(asked)),
        ),
        Stage(name="reward", who=reward.ref.name, provides=REWARD_COLUMNS, because="every step"),
    ]
    for name, role in (("old_log_probs", "actor"), ("ref_log_probs", "ref")):
        if name in demands:
            stages.append(
                Stage(
                    name=name,
                    who=f"{role} ({engine})",
                    provides=frozenset({name}),
                    because=f"required by {demands[name]}",
                )
            )
    update_why = "every step"
    if from_current:
        update_why += "; one update a rollout, so no pass for old log-probabilities"
    stages += [
        Stage(
            name="advantage",
            who=chosen["algorithm.advantage"].ref.name,
            provides=ADVANTAGE_COLUMNS,
            because="every step",
        ),
        Stage(name="update", who=f"actor ({engine})", provides=frozenset(), because=update_why),
        Stage(
            name="weight_sync",
            who=chosen["rollout.weight_transport"].ref.name,
            provides=frozenset(),
            because="the rollout follows the actor",
        ),
    ]
    return tuple(stages)


def _models(
    config: RunConfig, chosen: Mapping[str, _Chosen], demands: Mapping[str, str]
) -> tuple[ModelRole, ...]:
    actor = chosen["actor.engine"].ref
    models = [
        ModelRole(
            role="actor",
            engine=actor,
            path=config.model.path,
            trained=True,
            because="the policy",
        )
    ]
    if "ref_log_probs" in demands:
        engine = chosen["ref.engine"].ref if "ref.engine" in chosen else actor
        models.append(
            ModelRole(
                role="ref",
                engine=engine,
                path=config.ref.path or config.model.path,
                trained=False,
                because=f"{demands['ref_log_probs']} requires ref_log_probs",
            )
        )
    return tuple(models)
