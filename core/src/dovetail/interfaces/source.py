"""ExperienceSource: makes the samples of a step, and takes new weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import attrs

from dovetail.errors import ConfigError, DovetailError
from dovetail.interfaces.plugin import Logger, Plugin, PluginConfig, Tokenizer
from dovetail.interfaces.preflight import Finding
from dovetail.interfaces.runtime import Runtime, WorkerGroupHandle
from dovetail.interfaces.source_data import SourceData
from dovetail.interfaces.source_description import SourceDescription

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch
    from dovetail.interfaces.model_shape import MemoryRules
    from dovetail.interfaces.stage import Experience, PlanFacts, StepContext
    from dovetail.sections import PluginSection, RunConfig
    from dovetail.sections.placement import Pool

Key = tuple[int, int, int]
"""Epoch, index and attempt of a prompt or an example (`Prompt.key`), by which the ledger identifies it."""
Selection: TypeAlias = "tuple[str, PluginSection | None]"
"""A kind of plugin, and the config section that selects a plugin of this kind; None if no plugin is selected."""
Measure = Callable[["Batch"], Mapping[str, float]]
"""A function that returns the metrics of each role's objective on a batch, without gradient: `val/loss` for `actor/loss`, and
`val/ROLE/…` for another role. The function runs the stages whose columns the objectives read."""


@attrs.frozen(kw_only=True)
class StepAsk:
    """The request of a step for samples from its source."""

    step: int
    """The next step that takes samples."""
    due: int
    """The last step that may train on samples from the source's current weights."""
    groups: int
    """Number of groups that a step takes: `data.train_batch_size`."""
    columns: frozenset[str] = frozenset()
    """Optional columns that the step needs, such as `rollout_log_probs`."""


@attrs.frozen(kw_only=True)
class StepRows:
    """The number and kind of rows that a step takes."""

    name: str
    """Name of the rows in the plural, for people: `prompts`, `preference pairs`."""
    samples: int = 1
    """Number of samples that a step has of each row."""
    samples_are: str = "samples"
    """Name of the samples in the plural: `answers`."""


@attrs.frozen(kw_only=True)
class PlannedPart:
    """Work of a step outside its stages, for display: `who` does it, `because` gives the reason, `provides` the columns that it writes."""

    name: str
    who: str
    because: str
    provides: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True)
class SourcePlacement:
    """The placement of a source's own processes. A source extends this class with the data that it needs to start the processes."""

    described: Mapping[str, str] = attrs.field(factory=dict)
    """Description of the processes of each role, such as `rollout × 2`."""
    apart: bool = False
    """Whether the source computes in processes of its own, even if the runtime runs everything else in one process."""
    elsewhere: frozenset[str] = frozenset()
    """Roles whose engines already run elsewhere, so that this environment does not need the packages of these engines."""
    beside: bool = False
    """Whether the source may start while training models load in the same process or on the same accelerators."""
    imports: tuple[str, ...] = ()
    """Modules to import before a concurrent start, since two threads that first import a module at once can see it half initialised."""


class SentWeights(Protocol):
    """The record of which versions of the actor's weights the experience source has sent to the processes that make samples."""

    @property
    def version(self) -> int:
        """The last version sent; 0 is the model at `model.path`."""

    @property
    def stale(self) -> bool:
        """Whether the actor's weights have changed since this process last sent weights, or this process has sent none."""

    def sending(self, arrived: Callable[[int], bool]) -> AbstractContextManager[int]:
        """Return a context manager whose value is the version to send in the block.

        Args:
            arrived: a function that returns whether a receiver holds a version. If the block fails, a version that arrived counts as sent.
        """


class Offloading(Protocol):
    """Moves training roles onto and off the accelerator, for a source."""

    def present(self, *roles: str) -> AbstractContextManager[None]:
        """Return a context manager within which these roles are on the accelerator."""

    def settle(self) -> None:
        """Move every role with `offload` set in the config (`actor.offload`, …) off the accelerator."""

    def free_caches(self) -> None:
        """Make the roles on the accelerator release unused memory, before a rollout engine wakes on the same accelerator."""


@attrs.frozen(kw_only=True)
class Site:
    """The parts of a run that `ExperienceSource.open` receives."""

    config: RunConfig
    plan: Any
    """The run's Plan."""
    data: SourceData
    """The data that the source's `load` returned."""
    loader: Any
    """Loader of the training data; it enters each row that it issues in the ledger."""
    ledger: Any
    """Record of what happened to every row."""
    runtime: Runtime
    actor: WorkerGroupHandle
    """The worker group whose weights are sent."""
    weights: SentWeights
    offloading: Offloading
    phase: Callable[[str], AbstractContextManager[None]]
    """Function that times a part of the step under a name."""
    metrics: Callable[[], dict[str, float]]
    """Function that returns the running step's dict of metrics; a source adds metrics to the dict outside of `collect`."""
    finished: Callable[[], int]
    """Function that returns the number of finished steps."""
    check_stop: Callable[[], None]
    """Function that raises StopRequested if the user has asked for a stop."""
    hooks: Any
    """The hooks of all observers, called as `hooks.samples_logged(step=1, rows=rows)`."""
    directory: Any
    """The run directory, with its path and its writers."""
    logger: Logger

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return Path(self.directory.path)


class ExperienceSource(SourceDescription):
    """Makes the samples of each step. Checkpoints keep the source's `state()`.

    Between `open` and `close`, all methods are called from the trainer's thread. Work that `admit` started runs concurrently.
    """

    roles: ClassVar[tuple[str, ...]] = ()
    """Roles whose processes the source starts, placed beside the models: `rollout`. A role is also the key path of its engine's section."""
    on_request: ClassVar[frozenset[str]] = frozenset()
    """Columns that are costly to make, and that a step has only if a plugin requires them."""
    follows: ClassVar[bool] = True
    """Whether the actor's weights generate the samples, so that the trainer must publish weights before it collects samples. If not,
    `Run.admit` and `Run.publish_weights` do nothing."""

    # -- planning: torch and data are not loaded yet -----------------------------------------------

    @classmethod
    def selects(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, Selection]:
        """Return the kind and the config section of each plugin that the source uses, by key path. The section is None if no plugin is
        selected.

        Args:
            config: the plugin's own config.
            facts: the facts of the run, with all plugins except the source's own.
        """
        return {}

    @classmethod
    @abstractmethod
    def rows(cls, config: PluginConfig, facts: PlanFacts) -> StepRows:
        """Return the number and the kind of rows of data that a step takes.

        Raises:
            PlanError: the source does not support the config.
        """

    @classmethod
    @abstractmethod
    def gives(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the columns of a step before its first stage: those always made, and those of `facts.required` that it can make."""

    @classmethod
    def lacks(cls, config: PluginConfig, facts: PlanFacts, column: str) -> tuple[str, str] | None:
        """Return why a step lacks a column, and the fix; None if the source is not the cause."""
        return None

    @classmethod
    def age(cls, config: PluginConfig, facts: PlanFacts) -> int:
        """Return the largest number of steps between the weights that make a sample and the step that trains on the sample.

        `PlanFacts.age` is the larger of this value and the trainer's `max_staleness`.
        """
        return 0

    @classmethod
    @abstractmethod
    def parts_of_step(cls, config: PluginConfig, facts: PlanFacts) -> Sequence[PlannedPart]:
        """Return the parts of a step that make its samples, as `dovetail plan` prints them."""

    @classmethod
    def publication(cls, config: PluginConfig, facts: PlanFacts) -> PlannedPart | None:
        """Return the part of a step that sends the actor's weights to the source; None if the source takes no weights."""
        return None

    @classmethod
    def placed(
        cls, config: PluginConfig, facts: PlanFacts, pools: Mapping[str, Pool]
    ) -> SourcePlacement:
        """Return the placement of the source's processes.

        Args:
            config: the plugin's own config.
            facts: the facts of the run.
            pools: the resource pools of the source's roles.

        Raises:
            PlanError: the processes do not fit into the pools, or exclude each other.
        """
        return SourcePlacement()

    @classmethod
    def memory(cls, config: PluginConfig, plan: Any) -> Mapping[str, Mapping[str, int]]:
        """Return, by role and purpose, the bytes that a rank uses. Those of the first purpose are always used; the others are upper bounds.

        Raises:
            ModelError: a model can't be read.
        """
        return {}

    @classmethod
    def memory_rules(cls, config: PluginConfig, plan: Any) -> Mapping[str, MemoryRules]:
        """Return, by role, the rule for sharing an accelerator with training models. An engine without a rule stays on the accelerator."""
        return {}

    # -- data --------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def read_tokenizer(cls, config: PluginConfig, facts: PlanFacts) -> Tokenizer:
        """Return the tokenizer of the run's model, with its chat template.

        Args:
            config: the plugin's own config.
            facts: the facts that `load` receives.

        Raises:
            ModelError: the tokenizer can't be read.
            ConfigError: the config sets an argument that the chat template does not use.
        """

    @classmethod
    @abstractmethod
    def load(cls, config: PluginConfig, facts: PlanFacts, tokenizer: Tokenizer) -> SourceData:
        """Return the training rows and the held-out rows, checked.

        Args:
            config: the plugin's own config.
            facts: the facts of the run, with its trainer and its source alone as plugins.
            tokenizer: the tokenizer that `read_tokenizer` returned.

        Raises:
            DataError, ModelError: something is missing or wrong; the error names file and row.
            ConfigError: the source does not support the config.
        """

    @classmethod
    def examine(
        cls, config: PluginConfig, facts: PlanFacts, data: Any, reward: Callable[..., Any] | None
    ) -> Iterator[str | Finding | DovetailError]:
        """Check the data together with the plugins that use it, for `dovetail check`. Yield a line for each check made, and each problem.

        Args:
            config: the plugin's own config.
            facts: the facts that `load` receives.
            data: the data that `load` returned; None if `load` failed.
            reward: the caller's function that scores every row; None if there is none.

        Raises:
            DovetailError: a fault prevents all further checks.
        """
        if reward is not None:
            rows = cls.rows(config, facts).name
            yield ConfigError(
                f"a reward function is given, but a run on {rows} of a dataset scores no responses",
                hint="leave the reward function out",
            )

    # -- running ----------------------------------------------------------------------------------------

    def launch(self, plan: Any, reward: Callable[..., Any] | None) -> None:
        """Start processes that load models, possibly in a thread while the training models start. `start` is called afterwards.

        Args:
            plan: the plan of the run; `context.runtime` starts processes.
            reward: the caller's function that scores every row; None if there is none.
        """

    @abstractmethod
    def open(self, site: Site) -> None:
        """Start making samples for a run whose models have been loaded."""

    @property
    def parts(self) -> Mapping[str, Plugin]:
        """The source's own plugins whose states checkpoints keep, by key path."""
        return {}

    @property
    def observers(self) -> Mapping[str, object]:
        """Observers (see `dovetail.hooks`) that the source adds to the run, by a name for reports; read after `start`, before `open`."""
        return {}

    @property
    def outstanding(self) -> int:
        """Number of groups that `admit` has started and no step has taken yet."""
        return 0

    def admit(self, groups: int, ask: StepAsk) -> None:
        """Start making groups of samples for later steps, and return at once.

        Args:
            groups: the number of groups.
            ask: the request of the next step that takes groups.
        """

    @abstractmethod
    def collect(self, step: StepContext, ask: StepAsk) -> Experience:
        """Return the samples of a step: first those of groups that `admit` has started, then new ones for the rest.

        Args:
            step: the running step; the source adds metrics to `step.metrics` and the samples' tokens to `step.tokens`.
            ask: the step's request.

        Raises:
            StopRequested: the user has asked for a stop.
        """

    @abstractmethod
    def settle(self, step: int, trained: Collection[Key], left_out: Mapping[Key, str]) -> None:
        """Record which samples of a step were trained on or dropped.

        Args:
            step: the number of the step.
            trained: the keys of the prompts that were trained on.
            left_out: the keys of the prompts that were left out, with the reason.
        """

    @abstractmethod
    def give_back(self, step: int, *, sound: bool) -> None:
        """Take back the samples of a step that ended early, for use in the next step.

        Args:
            step: the number of the step.
            sound: True if the step was stopped; False after a failure, which the samples may have caused, so that no checkpoint keeps them.
        """

    def publish(self) -> None:
        """Send the actor's weights to the processes that make samples, if the weights have changed; see `SentWeights.sending`.

        Raises:
            WeightSyncError: the weights did not arrive.
        """

    def rest(self) -> None:
        """Move the source's engines off the accelerator, to make room for training roles; `collect` and `validate` move them back."""

    def validate(self, measure: Measure) -> dict[str, float]:
        """Return metrics of held-out rows; empty if there are no such rows.

        Args:
            measure: the function that computes the metrics of the objectives on a batch, see `Measure`.
        """
        return {}

    def fixed(self) -> Sequence[Batch]:
        """Return batches of the rows that the run uses more than once without changing them; by default none.

        Columns that depend only on these rows and on frozen models are computed once.
        """
        return ()

    def summary(self) -> Mapping[str, Any]:
        """Return the run's accuracy for its summary: `accuracy_metric`, `accuracy_before` and `accuracy_after`; None stands for unknown."""
        return dict.fromkeys(("accuracy_metric", "accuracy_before", "accuracy_after"))
