"""The plan of a run: the stages that every step executes, the models behind them, counts and placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from dovetail.errors import DovetailError, ModelError
from dovetail.interfaces.model_shape import BYTES, ModelShape
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.preflight import Finding
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.source import PlannedPart
from dovetail.interfaces.stage import PlanFacts
from dovetail.planning.counts import RunCounts, count
from dovetail.planning.images import check_images
from dovetail.planning.models import ModelRole, check_optimizers, models_of
from dovetail.planning.placement import Placement, place
from dovetail.planning.resolved_plugins import choose, refs_of
from dovetail.planning.stage_list import PlannedStage, list_stages
from dovetail.plugins.load import load_plugin_class, make_plugin
from dovetail.sections import RunConfig


@attrs.frozen(kw_only=True)
class Plan:
    """What is decided before a run starts: stages, models, counts and placement."""

    collection: tuple[PlannedPart, ...]
    """Work that produces the samples of a step, such as generation and scoring; for display."""
    stages: tuple[PlannedStage, ...]
    """Stages that the learner executes, in this order."""
    publication: PlannedPart | None
    """Transfer of the actor's weights to the experience source; None if the source takes no weights."""
    facts: PlanFacts
    """Facts that the stages were planned with; `facts.required` maps every required column to what requires it."""
    models: tuple[ModelRole, ...]
    refs: Mapping[str, PluginRef]
    """The chosen plugin of each config section, by its key path."""
    counts: RunCounts
    placement: Placement
    """Placement of the run's roles and processes."""
    left_out: tuple[str, ...] = ()
    """Sentences for a preflight warning, each about content of the dataset's rows that the chat template leaves out."""

    @property
    def generates(self) -> bool:
        """Whether the run has a rollout."""
        return "rollout" in self.refs

    @property
    def key_figures(self) -> dict[str, str]:
        """Metrics that show a run's progress, each with its better direction (`up` or `down`).

        These are the reward, and the metrics that objectives name, in training and on held-out data.
        """
        found = {"reward/mean": "up"} if self.generates else {}
        for model in self.models:
            chosen = self.facts.plugins.get(f"{model.key}.objective")
            if model.objective is None or chosen is None or model.role == "critic":
                continue
            held_out = "val" if model.role == "actor" else f"val/{model.role}"
            for prefix in (model.role,) if self.generates else (model.role, held_out):
                found |= {f"{prefix}/{name}": b for name, b in chosen.cls.key_figures.items()}
        return found

    def has_stage(self, name: str) -> bool:
        """Return whether a step runs a stage of this name."""
        return any(stage.name == name for stage in self.stages)

    def examined(self, data: Any) -> Iterator[tuple[str, Iterator[str | Finding | DovetailError]]]:
        """Let every stage check the data (`Stage.examine`); yield its name with the notes, findings and errors of the check.

        `data` is what the experience source's `load` returned.
        """
        for stage in self.stages:
            cls: Any = load_plugin_class(stage.ref)
            yield stage.name, cls.examine(stage.ref.config, self.facts, data)

    def device_of(self, role: str) -> str | None:
        """Return the device type of a role, such as `cpu` or `cuda`; None if it can't be known on this machine."""
        if not self.placement.in_process:
            return None if self.placement.pool(role).accelerators else "cpu"
        try:
            runtime: Any = make_plugin(self.refs["runtime"], PluginContext())
            return str(runtime.device()).partition(":")[0]
        except DovetailError:
            return None  # the runtime reports the error when it starts

    def shape(self, model: ModelRole) -> ModelShape:
        """Return the shape of a role's model from the role's engine; for errors see `TrainEngine.shape`."""
        section = self.facts.config.model_section(model.role)
        shape: ModelShape = self.facts.engine(model.role).cls.shape(section)
        return shape

    def optimizer_bytes(self, model: ModelRole, shape: ModelShape) -> int:
        """Return the bytes of a role's optimizer state, over all ranks."""
        optimizer = self.facts.plugins[f"{model.key}.optim"]
        if model.adapter is None:
            matrices = shape.linear_parameters
            others = max(0, model.parameters(shape) - matrices)
        else:
            matrices, others = shape.adapter_parameters(model.adapter), 0
        sizes: list[float] = [
            optimizer.cls.state_bytes(optimizer.config, matrix=m) for m in (True, False)
        ]
        return round(matrices * sizes[0] + others * sizes[1])

    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint's weights and optimizer states, over all ranks; 0 if a model's shape can't be read."""
        total = 0
        for model in self.models:
            if not model.moves:
                continue
            try:
                shape = self.shape(model)
            except ModelError:
                return 0
            adapter = model.adapter
            trained = (
                model.parameters(shape) if adapter is None else shape.adapter_parameters(adapter)
            )
            total += trained * BYTES["float32"]
            if model.trained:
                total += self.optimizer_bytes(model, shape)
        return total

    def total_updates(self, role: str) -> int | None:
        """Return the optimizer steps of a role in the run; None if the data has not been read."""
        if role == "critic":
            return self.counts.total_critic_updates
        section = self.facts.config.roles.get(role)
        if section is None or self.counts.steps is None:
            return self.counts.total_updates
        batch = self.counts.prompts_per_step
        return self.counts.steps * section.epochs * -(-batch // (section.mini_batch_size or batch))

    @property
    def on_request(self) -> frozenset[str]:
        """Columns that the experience source makes only on request, and that every step must request, since a plugin requires them."""
        return self.facts.plugins["source"].cls.on_request & self.facts.required.keys()


def make_plan(
    config: RunConfig,
    *,
    prompts: int | None = None,
    images: bool = False,
    left_out: tuple[str, ...] = (),
) -> Plan:
    """Return the plan of a run, derived from its config: stages, models, counts and placement.

    Args:
        config: the whole config.
        prompts: the number of training prompts after filtering; None if the data has not been read.
        images: whether prompts have images, which every engine must then take.
        left_out: sentences about content of the dataset's rows that the chat template leaves out; kept as `Plan.left_out`.

    Raises:
        PlanError: a requirement is unmet, or sizes contradict each other; the error names the parts of the config that conflict.
    """
    chosen = choose(config)
    source = chosen["source"]
    facts = PlanFacts(config=config, plugins=chosen, updates_per_step=1)
    counts = count(config, prompts, source.cls.rows(source.config, facts))
    facts, stages = list_stages(config, chosen, counts.updates_per_step)
    models = tuple(models_of(facts, stages))
    if any(model.role == "critic" for model in models):
        counts = attrs.evolve(counts, critic_warmup_steps=config.critic.warmup_steps)
    if images:
        own = [chosen[role] for role in source.cls.roles]
        check_images([*own, *(facts.engine(model.role) for model in models)])
    placement, models = place(facts, models)
    check_optimizers(facts, models)
    return Plan(
        collection=tuple(source.cls.parts_of_step(source.config, facts)),
        stages=stages,
        publication=source.cls.publication(source.config, facts),
        facts=facts,
        models=models,
        refs=refs_of(chosen) | {f"stages.{stage.name}": stage.ref for stage in stages},
        counts=counts,
        placement=placement,
        left_out=left_out,
    )
