"""Stage: one part of a learner step. A step is an ordered list of stages, in five phases, between rollout and weight update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

import attrs

from dovetail.errors import DovetailError, PluginBrokenError
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.plugin import ColumnPlugin, Logger, Plugin, PluginConfig
from dovetail.interfaces.preflight import Finding
from dovetail.interfaces.runtime import PluginRef, WorkerGroupHandle
from dovetail.sections import FollowSection, PluginSection, RunConfig

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch
    from dovetail.interfaces.reward import Sample


Phase = Literal["score", "check", "transform", "estimate", "update"]
"""`score`: forward passes, one a role. `check`: may stop the step, changes nothing. `transform`: writes and rewrites
columns. `estimate`: advantages and returns. `update`: optimizer steps."""
PHASES: tuple[Phase, ...] = get_args(Phase)
"""All phases, in the order in which a step runs them."""


@attrs.frozen
class SelectedPlugin:
    """A plugin that the config selects."""

    path: str
    """Key path of its section, such as `algorithm.advantage`."""
    ref: PluginRef
    cls: Any
    """Its class."""
    config: PluginSection

    @property
    def title(self) -> str:
        """Kind, name and key path, for messages."""
        return f"{self.ref.kind.replace('_', ' ')} {self.ref.name!r} ({self.path})"

    def requires(self) -> frozenset[str]:
        """Return the columns that the plugin reads under its config; empty for a stage, whose columns depend on the other stages."""
        cls: type = self.cls
        return cls.requires(self.config) if issubclass(cls, ColumnPlugin) else frozenset()

    def provides(self) -> frozenset[str]:
        """Return the columns that it can write under its config."""
        cls: type = self.cls
        return cls.provides(self.config) if issubclass(cls, ColumnPlugin) else frozenset()


@attrs.frozen(kw_only=True)
class PlanFacts:
    """What the planner passes to the class methods of a stage."""

    config: RunConfig
    plugins: Mapping[str, SelectedPlugin]
    """Every plugin that the config selects, by the key path of its section."""
    updates_per_step: int
    """Optimizer steps of the actor after each rollout."""
    required: Mapping[str, str] = attrs.field(factory=dict)
    """Columns that are required so far, and what requires each. The planner only adds columns, and calls every stage again
    after each addition: what a stage requires or provides may depend on what others require."""

    @property
    def reference(self) -> tuple[str, str]:
        """The role and output that give the reference's log-probabilities: those of `ref`, or the actor's with its adapter disabled."""
        ref, actor = self.config.ref, self.plugins["actor.engine"]
        own = ref.path is not None or ref.engine is not None or ref.update is not None
        if own or "ref_log_probs" not in actor.provides():
            return "ref", "log_probs"
        return "actor", "ref_log_probs"

    @property
    def age(self) -> int:
        """The most steps between the weights that made a sample and the step that trains on it: the source's or the trainer's bound."""
        trainer, source = self.plugins.get("trainer"), self.plugins.get("source")
        bounds = [0]
        if trainer is not None:
            bounds.append(int(trainer.cls.max_staleness(trainer.config)))
        if source is not None:
            bounds.append(int(source.cls.age(source.config, self)))
        return max(bounds)

    def engine(self, role: str) -> SelectedPlugin:
        """Return the training engine of a role; the actor's engine where the role selects none."""
        own = self.plugins.get(f"{self.config.role_key(role)}.engine")
        return own or self.plugins["actor.engine"]


class Experience(Protocol):
    """The samples of a step, and data that its batch can't hold."""

    @property
    def samples(self) -> Sequence[Sample]:
        """All generated samples, including those that are not trained on."""
        ...

    @property
    def reasons(self) -> Mapping[tuple[int, int, int], str]:
        """(epoch, prompt, attempt) of each prompt that is not trained on → why."""
        ...

    def batch(self) -> Batch:
        """Return the columns of the samples that are trained on."""
        ...


@attrs.define(kw_only=True, eq=False)
class StepContext:
    """The shared state of one step's stages, which ends with the step."""

    number: int
    """Number of the step; the first is 1."""
    facts: PlanFacts
    """Facts of the finished plan."""
    roles: Mapping[str, WorkerGroupHandle]
    """Worker groups by role: `step.roles["actor"].forward(batch, outputs).result()`. A stage uses those that it names in
    `roles`."""
    plugins: Mapping[str, Any]
    """Plugins on the controller, by the key path of the section that selects them, such as `algorithm.advantage`."""
    logger: Logger
    timer: Callable[[str], AbstractContextManager[None]]
    """Times a block; its seconds become the metric `time/NAME`. Around each stage there is one with the stage's name."""
    weight_version: int = 0
    """Version of the weights that the rollout held."""
    first: bool = False
    """Whether it is the first step of a process, in which what plugins return is checked thoroughly."""
    collected: Experience | None = None
    """Experience that `Run.collect` collected; None before."""
    tokens: int = 0
    """Tokens of the step's prompts and responses."""
    counted: bool = False
    """Whether its updates are through, so that the step counts even if it raises afterwards."""
    metrics: dict[str, float] = attrs.field(factory=dict)
    """Metrics of the step; a stage adds its own."""
    updates: dict[str, int] = attrs.field(factory=dict)
    """Optimizer steps taken so far, by role, at first 0 for each that is trained; a stage of the phase `update` counts its own."""

    @property
    def config(self) -> RunConfig:
        """The whole config."""
        return self.facts.config

    @property
    def experience(self) -> Experience:
        """The samples of the step.

        Raises:
            PluginBrokenError: `Run.collect` was not called.
        """
        if self.collected is None:
            raise PluginBrokenError(
                f"step {self.number} has no experience",
                hint="the trainer calls `run.collect(step)` before `run.learn(step)`",
            )
        return self.collected


class Stage(Plugin):
    """One stage of a step, selected by `algorithm.stages`.

    Its class methods declare what it needs; they depend on the stage's own config and the facts alone. The planner orders the stages of a
    phase as in the config, as far as `before` and `after` allow, and refuses a list in which a column is read before it is written.
    """

    phase: ClassVar[Literal["score", "check", "transform", "estimate", "update"]]
    """When it runs. `score`: forward passes. `check`: may stop the step by a `NumericsError`, and writes nothing. `transform`: writes
    and rewrites columns. `estimate`: advantages and returns. `update`: optimizer steps. A stage reads what those of earlier
    phases wrote: one that clips `advantages` has the phase `estimate`, behind the estimator."""
    before: ClassVar[tuple[str, ...]] = ()
    """Names of stages of its phase that run after it, where they are in the step: a tuple, `("kl_penalty",)`."""
    after: ClassVar[tuple[str, ...]] = ()
    """Names of stages of its phase that run before it, where they are in the step: a tuple. A name that is not there orders nothing."""
    changes_samples: ClassVar[bool] = False
    """Whether `run` may return other samples than it was given: some of them, or further ones. Each has every column that is there and that a later
    stage requires. A step that has none left trains on nothing."""

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> Collection[str]:
        """Return the columns that it reads, in the version that they have when it runs. Others may be absent.

        Returns:
            A set; or a mapping from each column to what reads it, for the plan, where that is not the stage itself.
        """
        return frozenset()

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the columns that the stage writes first. Those that core does not define are in `columns`."""
        return frozenset()

    @classmethod
    def rewrites(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the existing columns that the stage rewrites. Two stages of one phase that rewrite the same column must name each other in
        `before` or `after`.
        """
        return frozenset()

    @classmethod
    def constant(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the stage's columns that depend on a sample's prompt, response and mask alone, because the models behind them do not
        change. A run that sees a dataset's examples several times computes such columns once, where the stage writes no others.
        """
        return frozenset()

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        """Return why the stage is active, for the plan. A stage of the stage set is left out where this is None; one that the config
        selects is always active.
        """
        return None

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        """Return the roles (`actor`, `ref`, `critic`, or a name of `roles` in the config) whose models it computes with: they exist for
        it, and are on the accelerator while it runs.
        """
        return ()

    @classmethod
    def objectives(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, ObjectiveSpec]:
        """Return the objective of each role that the stage trains; such a role has an optimizer and is in checkpoints."""
        return {}

    @classmethod
    def follows(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, FollowSection]:
        """Return how each untrained role whose weights the stage moves follows the actor."""
        return {}

    @classmethod
    def examine(
        cls, config: PluginConfig, facts: PlanFacts, data: Any
    ) -> Iterator[str | Finding | DovetailError]:
        """Check what a run depends on before its start; yield a line for each thing that was checked, and problems, for `dovetail check`.

        Args:
            config: the plugin's own config.
            facts: the facts of the finished plan.
            data: the data that the source's `load` returned: `data.prompts` yields all rows, each with its
                `data_source`.
        """
        yield from ()

    def asks(self, number: int, facts: PlanFacts) -> frozenset[str]:
        """Return the optional columns that the stage uses in step `number` if the rollout provides them: `rollout_log_probs`,
        `raw_rollout_log_probs`.
        """
        return frozenset()

    def skips(self, batch: Batch, step: StepContext) -> bool:
        """Return whether the stage has nothing to do in this step. Only a stage whose columns no later stage requires may skip."""
        return False

    @abstractmethod
    def run(self, batch: Batch, step: StepContext) -> Batch:
        """Return the batch with the columns that the stage provides and rewrites; its samples and their order stay, unless it
        `changes_samples`.

        Args:
            batch: N samples, N > 0, with every column that was written so far. Its arrays are not written to:
                `batch.with_columns({"advantages": clipped})` makes another batch.
            step: the current step; metrics go to `step.metrics`.

        Raises:
            NumericsError: a number is not finite, or differs by more than is allowed; `sample_ids` names the samples.
        """

    def step_counted(self, batch: Batch, step: StepContext) -> None:
        """Update the stage's own state after a step whose updates are complete.

        Args:
            batch: the batch that the last stage returned; empty where no sample was left to train on.
            step: the step, with its metrics and counted updates.
        """
