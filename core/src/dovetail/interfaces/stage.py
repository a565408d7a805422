"""Stage: one part of a training step. Between rollout and weight update, a step runs an ordered list of stages in five phases."""

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
    """Key path of the section that selects the plugin, such as `algorithm.advantage`."""
    ref: PluginRef
    cls: Any
    """The class of the plugin."""
    config: PluginSection

    @property
    def title(self) -> str:
        """Kind, name and key path of the plugin, for messages."""
        return f"{self.ref.kind.replace('_', ' ')} {self.ref.name!r} ({self.path})"

    def requires(self) -> frozenset[str]:
        """Return the columns that the plugin reads under its config; empty for a stage, whose columns depend on the other stages."""
        cls: type = self.cls
        return cls.requires(self.config) if issubclass(cls, ColumnPlugin) else frozenset()

    def provides(self) -> frozenset[str]:
        """Return the columns that the plugin can write under its config."""
        cls: type = self.cls
        return cls.provides(self.config) if issubclass(cls, ColumnPlugin) else frozenset()


@attrs.frozen(kw_only=True)
class PlanFacts:
    """The facts of a run that the planner passes to the class methods of a stage."""

    config: RunConfig
    plugins: Mapping[str, SelectedPlugin]
    """Every plugin that the config selects, by the key path of its section."""
    updates_per_step: int
    """Optimizer steps of the actor after each rollout."""
    required: Mapping[str, str] = attrs.field(factory=dict)
    """Columns that are required so far, and what requires each column. The planner only adds columns, and calls every stage again
    after each addition: what a stage requires or provides may depend on what others require."""

    @property
    def reference(self) -> tuple[str, str]:
        """The role that computes the reference policy's log-probabilities, and the name of the engine output that holds them.

        ("ref", "log_probs"), or ("actor", "ref_log_probs") if the actor computes them with its adapter disabled.
        """
        ref, actor = self.config.ref, self.plugins["actor.engine"]
        own = ref.path is not None or ref.engine is not None or ref.update is not None
        if own or "ref_log_probs" not in actor.provides():
            return "ref", "log_probs"
        return "actor", "ref_log_probs"

    @property
    def age(self) -> int:
        """Largest number of steps between a sample's weights and its training step: the larger of the source's and the trainer's bound."""
        trainer, source = self.plugins.get("trainer"), self.plugins.get("source")
        bounds = [0]
        if trainer is not None:
            bounds.append(int(trainer.cls.max_staleness(trainer.config)))
        if source is not None:
            bounds.append(int(source.cls.age(source.config, self)))
        return max(bounds)

    def engine(self, role: str) -> SelectedPlugin:
        """Return the training engine of a role; the actor's engine if the role selects none."""
        own = self.plugins.get(f"{self.config.role_key(role)}.engine")
        return own or self.plugins["actor.engine"]


class Experience(Protocol):
    """The samples of a step, and data about them that a batch can't hold."""

    @property
    def samples(self) -> Sequence[Sample]:
        """All generated samples, including those that are not trained on."""
        ...

    @property
    def reasons(self) -> Mapping[tuple[int, int, int], str]:
        """The reason why a prompt is not trained on, by the prompt's (epoch, index, attempt), see `Prompt.key`."""
        ...

    def batch(self) -> Batch:
        """Return the columns of the samples that are trained on."""
        ...


@attrs.define(kw_only=True, eq=False)
class StepContext:
    """The state that the stages of one step share."""

    number: int
    """Number of the step; the first is 1."""
    facts: PlanFacts
    """Facts of the finished plan."""
    roles: Mapping[str, WorkerGroupHandle]
    """Worker groups by role: `step.roles["actor"].forward(batch, outputs).result()`. A stage uses the roles that it names in
    `Stage.roles`."""
    plugins: Mapping[str, Any]
    """Plugins on the controller, by the key path of the section that selects them, such as `algorithm.advantage`."""
    logger: Logger
    timer: Callable[[str], AbstractContextManager[None]]
    """Function that times a block; the seconds become the metric `time/NAME`. Each stage is timed under the stage's name."""
    weight_version: int = 0
    """Version of the weights that the rollout held when the step began."""
    first: bool = False
    """Whether the step is the first since the run was started or resumed. The results of plugins are checked thoroughly in this step."""
    collected: Experience | None = None
    """Experience that `Run.collect` collected; None before the call."""
    tokens: int = 0
    """Tokens of the step's prompts and responses."""
    counted: bool = False
    """Whether the updates are complete, so that the step counts even if it raises an error afterwards."""
    metrics: dict[str, float] = attrs.field(factory=dict)
    """Metrics of the step; a stage adds its own."""
    updates: dict[str, int] = attrs.field(factory=dict)
    """Optimizer steps so far by trained role, at first 0. A stage of the phase `update` counts its own optimizer steps."""

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
                f"step {self.number} has no samples: `run.collect(step)` was not called",
                hint="let the trainer call `run.collect(step)` before `run.learn(step)`",
            )
        return self.collected


class Stage(Plugin):
    """One stage of a step, selected by `algorithm.stages`.

    The class methods declare what the stage needs; they depend on the stage's config and the facts alone. The planner orders the stages
    of a phase as in the config, as far as `before` and `after` allow. A list in which a column is read before it is written is refused.
    """

    phase: ClassVar[Literal["score", "check", "transform", "estimate", "update"]]
    """Phase in which the stage runs. `score`: forward passes. `check`: may stop the step by a `NumericsError`, and writes nothing.
    `transform`: writes and rewrites columns. `estimate`: advantages and returns. `update`: optimizer steps. A stage reads the columns of
    earlier stages: a stage that clips `advantages` has the phase `estimate` and runs after the estimator."""
    before: ClassVar[tuple[str, ...]] = ()
    """Stages of the same phase that run after this stage, if they are in the step: a tuple of names, `("kl_penalty",)`."""
    after: ClassVar[tuple[str, ...]] = ()
    """Stages of the same phase that run before this stage, if they are in the step: a tuple of names. Other names have no effect."""
    changes_samples: ClassVar[bool] = False
    """Whether `run` may drop samples or return new ones. Each returned sample needs every existing column that a later stage requires. A
    step without samples trains on nothing."""

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> Collection[str]:
        """Return the columns that the stage reads, as earlier stages leave them. Other columns may be absent.

        Returns:
            A set of columns. If the stage itself is not the reader, a mapping from each column to its reader, for the plan.
        """
        return frozenset()

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the columns that the stage is the first to write. Columns that core does not define must be declared in `columns`."""
        return frozenset()

    @classmethod
    def rewrites(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the existing columns that the stage rewrites.

        Of two stages that rewrite the same column in the same phase, one must name the other in `before` or `after`.
        """
        return frozenset()

    @classmethod
    def constant(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the columns that depend on a sample's prompt, response and mask alone, because the models that compute them are frozen.

        A run that sees a dataset's examples several times computes such columns once, if the stage writes no others.
        """
        return frozenset()

    @classmethod
    def because(cls, config: PluginConfig, facts: PlanFacts) -> str | None:
        """Return why the stage is active, for the plan. With None, a stage of the stage set is left out; a stage that the config selects is
        always active.
        """
        return None

    @classmethod
    def roles(cls, config: PluginConfig, facts: PlanFacts) -> tuple[str, ...]:
        """Return the roles (`actor`, `ref`, `critic`, or a name of `roles` in the config) whose models the stage uses.

        The run loads these models, which are on the accelerator while the stage runs.
        """
        return ()

    @classmethod
    def objectives(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, ObjectiveSpec]:
        """Return the objective of each role that the stage trains. Such a role has an optimizer, and checkpoints keep its state."""
        return {}

    @classmethod
    def follows(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, FollowSection]:
        """Return, for each untrained role whose weights the stage changes, the rule by which these weights follow the actor's."""
        return {}

    @classmethod
    def examine(
        cls, config: PluginConfig, facts: PlanFacts, data: Any
    ) -> Iterator[str | Finding | DovetailError]:
        """Check what the stage needs before the run starts, for `dovetail check`. Yield a line for each check made, and each problem.

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
        """Return the batch with the columns that the stage provides and rewrites. Samples and their order stay the same, unless
        `changes_samples`.

        Args:
            batch: N samples, N > 0, with every column that was written so far. Do not write to its arrays:
                `batch.with_columns({"advantages": clipped})` makes a new batch.
            step: the current step; metrics go to `step.metrics`.

        Raises:
            NumericsError: a number is not finite, or differs by more than the config allows; `sample_ids` names the samples.
        """

    def step_counted(self, batch: Batch, step: StepContext) -> None:
        """Update the stage's own state after a step whose updates are complete.

        Args:
            batch: the batch that the last stage returned; empty if no sample was left to train on.
            step: the step, with its metrics and its number of updates.
        """
