"""The plan of a run: the stages that every step executes, the models behind them, counts and placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from dovetail.errors import DovetailError, PlanError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.stage import PlanFacts, SelectedPlugin
from dovetail.planning.counts import NAMES, RunCounts, count
from dovetail.planning.images import check_images
from dovetail.planning.initial_columns import EPISODE_COLUMNS, REWARD_COLUMNS, initial_columns
from dovetail.planning.models import ModelRole, check_optimizers, models_of
from dovetail.planning.placement import Placement, place
from dovetail.planning.resolved_plugins import choose, examples_of_config, refs_of
from dovetail.planning.stage_list import PlannedStage, list_stages
from dovetail.plugins.load import make_plugin
from dovetail.sections import RunConfig
from dovetail.stages.algorithm import examples_of, uses_critic
from dovetail.stages.sampling import ON_REQUEST


@attrs.frozen(kw_only=True)
class PlannedPart:
    """What happens around the stages of a step, for people: generating, scoring, filtering, sending weights."""

    name: str
    who: str
    because: str
    provides: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True)
class Plan:
    """Everything decided before a run starts."""

    collection: tuple[PlannedPart, ...]
    """How the samples of a step come about."""
    stages: tuple[PlannedStage, ...]
    """What the learner executes, in this order."""
    publication: PlannedPart | None
    """How the rollout gets the weights; None without a rollout."""
    facts: PlanFacts
    """What the stages were asked with; `facts.required` has every column that something requires, and what requires it."""
    models: tuple[ModelRole, ...]
    refs: Mapping[str, PluginRef]
    """The chosen plugin of each config section, by its key path."""
    counts: RunCounts
    placement: Placement
    """Where everything lives."""
    left_out: tuple[str, ...] = ()
    """What the chat template leaves out of the rows, a sentence each."""

    @property
    def generates(self) -> bool:
        """Whether there is a rollout; else a step takes examples of the dataset."""
        return self.counts.kind == "prompts"

    def has_stage(self, name: str) -> bool:
        """Whether a step runs this stage."""
        return any(stage.name == name for stage in self.stages)

    def device_of(self, role: str) -> str | None:
        """Return the type of device that a role computes on, `cpu` or an accelerator's; None where that is known on another machine alone."""
        if not self.placement.in_process:
            return None if self.placement.pool(role).accelerators else "cpu"
        try:
            runtime: Any = make_plugin(self.refs["runtime"], PluginContext())
            return str(runtime.device()).partition(":")[0]
        except DovetailError:
            return None  # why it can't run is for the runtime to say

    def total_updates(self, role: str) -> int | None:
        """Return the optimizer steps of a role in the run; None where the data has not been read."""
        if role == "critic":
            return self.counts.total_critic_updates
        section = self.facts.config.roles.get(role)
        if section is None or self.counts.steps is None:
            return self.counts.total_updates
        batch = self.counts.prompts_per_step
        return self.counts.steps * section.epochs * -(-batch // (section.mini_batch_size or batch))

    @property
    def wanted_log_probs(self) -> frozenset[str]:
        """Columns with log-probabilities that every rollout is asked for."""
        return frozenset(ON_REQUEST) & self.facts.required.keys()

    @property
    def episode_columns(self) -> frozenset[str]:
        """Columns of episodes that something requires."""
        return EPISODE_COLUMNS & self.facts.required.keys()

    @property
    def baseline(self) -> bool:
        """Whether every prompt gets a greedy response."""
        return "baseline_scores" in self.facts.required

    @property
    def rollout_capabilities(self) -> frozenset[str]:
        """What the rollout engine can do beyond its interface."""
        return self.facts.plugins["rollout"].cls.capabilities


def make_plan(
    config: RunConfig,
    *,
    prompts: int | None = None,
    images: bool = False,
    left_out: tuple[str, ...] = (),
) -> Plan:
    """Work out the stages, models and counts of a run.

    Args:
        config: the whole config.
        prompts: training prompts after filtering; None where the data has not been read.
        images: whether prompts have images, which every engine must then take.
        left_out: see `Plan`.

    Raises:
        PlanError: a requirement that nothing meets, or counts that do not fit. Names both sides.
    """
    chosen = choose(config)
    kind = examples_of_config(config)
    if kind != "prompts" and config.algorithm.sample_filters:
        raise PlanError(
            f"algorithm.sample_filters leave out samples of a rollout, and trainer {chosen['trainer'].ref.name!r} trains on {kind} "
            "of the dataset",
            hint="leave algorithm.sample_filters out",
        )
    counts = count(config, prompts, kind)
    facts, stages = list_stages(config, chosen, counts.updates_per_step)
    if any(stage.name == "advantage" for stage in stages):
        _check_group_size(config, chosen["algorithm.advantage"])
    if uses_critic(facts):
        counts = attrs.evolve(counts, critic_warmup_steps=config.critic.warmup_steps)
    models = tuple(models_of(facts, stages))
    if images:
        generates = [chosen["rollout"]] if kind == "prompts" else []
        check_images([*generates, *(facts.engine(model.role) for model in models)])
    placement, models = place(config, chosen, models)
    check_optimizers(facts, models)
    return Plan(
        collection=tuple(_collection(facts)),
        stages=stages,
        publication=_publication(chosen) if kind == "prompts" else None,
        facts=facts,
        models=models,
        refs=refs_of(chosen) | {f"stages.{stage.name}": stage.ref for stage in stages},
        counts=counts,
        placement=placement,
        left_out=left_out,
    )


def _publication(chosen: Mapping[str, SelectedPlugin]) -> PlannedPart:
    transport = chosen["rollout.weight_transport"].ref.name
    return PlannedPart(name="weight_sync", who=transport, because="the rollout follows the actor")


def _collection(facts: PlanFacts) -> Iterator[PlannedPart]:
    """Rollout, greedy baselines, rewards, filters; or the dataset's examples."""
    config, required = facts.config, facts.required
    columns, kind = initial_columns(facts), examples_of(facts)
    if kind != "prompts":
        yield PlannedPart(
            name=kind,
            who=facts.plugins["data.source"].ref.name,
            because=f"trainer {facts.plugins['trainer'].ref.name} takes {NAMES[kind]} of the dataset",
            provides=columns,
        )
        return
    rollout = facts.plugins["rollout"].ref.name
    asked = sorted(columns & ON_REQUEST.keys())
    yield PlannedPart(
        name="rollout",
        who=rollout,
        because="every step" + "".join(f"; {column}: {required[column]}" for column in asked),
        provides=columns - REWARD_COLUMNS - {"baseline_scores", "loss_mask"},
    )
    if "baseline_scores" in columns:
        yield PlannedPart(
            name="baseline",
            who=f"{rollout}, greedy",
            because=f"required by {required['baseline_scores']}",
            provides=frozenset({"baseline_scores"}),
        )
    yield PlannedPart(
        name="reward",
        who=facts.plugins["reward.manager"].ref.name,
        because="every step",
        provides=REWARD_COLUMNS,
    )
    filters = [
        plugin.ref.name
        for path, plugin in facts.plugins.items()
        if path.startswith("algorithm.sample_filters[")
    ]
    if filters:
        rounds = config.algorithm.max_generation_rounds
        again = f"; up to {rounds} rounds of generation" if rounds > 1 else ""
        yield PlannedPart(
            name="filter",
            who=", ".join(filters),
            because=f"algorithm.sample_filters{again}",
            provides=columns & {"loss_mask"},
        )


def _check_group_size(config: RunConfig, estimator: SelectedPlugin) -> None:
    cls: Any = estimator.cls
    least = cls.min_group_size(estimator.config)
    if config.rollout.n < least:
        raise PlanError(
            f"{estimator.title} compares the samples of one prompt and needs at least {least} of "
            f"them, but rollout.n is {config.rollout.n}",
            hint=f"set rollout.n={max(least, 8)}, or choose an estimator that needs no groups, "
            "such as algorithm.advantage=reinforce_plus_plus",
        )
