"""ExperienceSource: where the samples of a step come from, and what is done with new weights."""

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
"""Epoch, row and attempt of a prompt or an example: its name in the ledger."""
Selection: TypeAlias = "tuple[str, PluginSection | None]"
"""A kind of plugin, and the section that selects one of it."""
Measure = Callable[["Batch"], Mapping[str, float]]
"""Returns what each role minimises on a batch, without gradient: the metrics of its objective, `val/loss` for `actor/loss`, and
`val/ROLE/…` for another role. Runs the stages that make the columns which objectives read."""


@attrs.frozen(kw_only=True)
class StepAsk:
    """A step's request to its source."""

    step: int
    """The next step that takes samples."""
    due: int
    """The last step that may train on samples of the weights that the source holds now."""
    groups: int
    """How many groups a step takes: `data.train_batch_size`."""
    columns: frozenset[str] = frozenset()
    """Columns on request, such as `rollout_log_probs`."""


@attrs.frozen(kw_only=True)
class StepRows:
    """The number and kind of rows that a step takes."""

    name: str
    """Their name in the plural, for people: `prompts`, `preference pairs`."""
    samples: int = 1
    """Number of samples of each row in a step."""
    samples_are: str = "samples"
    """Their name in the plural: `answers`."""


@attrs.frozen(kw_only=True)
class PlannedPart:
    """A part of a step outside of its stages, for display: generating, scoring, filtering, sending weights."""

    name: str
    who: str
    because: str
    provides: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True)
class SourcePlacement:
    """The placement of a source's own processes. A source extends it by what it needs to start them."""

    described: Mapping[str, str] = attrs.field(factory=dict)
    """Text that describes the processes of each of its roles: `rollout × 2`."""
    apart: bool = False
    """Whether it computes in processes of its own though the runtime runs all in one."""
    elsewhere: frozenset[str] = frozenset()
    """Roles that compute on engines which run already; this environment need not meet these engines' needs."""
    beside: bool = False
    """Whether it may start while training models load in the same process or on the same accelerators."""
    imports: tuple[str, ...] = ()
    """Modules that this start imports: two threads that first import one at the same time can see it half initialised."""


class SentWeights(Protocol):
    """The versions of the actor's weights, as a source sees them."""

    @property
    def version(self) -> int:
        """The last version that was sent; 0 is the model at `model.path`."""

    @property
    def stale(self) -> bool:
        """Whether the actor's weights have changed since this process sent them, or it has sent none."""

    def sending(self, arrived: Callable[[int], bool]) -> AbstractContextManager[int]:
        """Return a context whose value is the version that is sent in its block.

        Args:
            arrived: whether a receiver holds a version; asked where the block fails, since no other weights may get its number.
        """


class Offloading(Protocol):
    """Which training roles are on the accelerator, as a source sees it."""

    def present(self, *roles: str) -> AbstractContextManager[None]:
        """Return a context in which these roles are on the accelerator."""

    def settle(self) -> None:
        """Move every role that is offloaded between its stages off the accelerator."""

    def free_caches(self) -> None:
        """Make the roles on the accelerator release unused memory, before a rollout wakes beside them."""


@attrs.frozen(kw_only=True)
class Site:
    """The parts of a run that `open` gives to its source."""

    config: RunConfig
    plan: Any
    """The run's Plan."""
    data: SourceData
    """What the source's `load` returned."""
    loader: Any
    """Issues rows of the training data, each entered in the ledger."""
    ledger: Any
    """Accounts for every row."""
    runtime: Runtime
    actor: WorkerGroupHandle
    """The worker group whose weights are sent."""
    weights: SentWeights
    offloading: Offloading
    phase: Callable[[str], AbstractContextManager[None]]
    """Times a part of the step under a name."""
    metrics: Callable[[], dict[str, float]]
    """Returns the metrics of the step that is under way, for what happens outside of `collect`."""
    finished: Callable[[], int]
    """Returns the number of finished steps."""
    check_stop: Callable[[], None]
    """Raises StopRequested where a stop was asked for."""
    hooks: Any
    """Calls a hook of every observer: `hooks.samples_logged(step=1, rows=rows)`."""
    directory: Any
    """The run directory, with its path and its writers."""
    logger: Logger

    @property
    def path(self) -> Path:
        """Return the path of the run directory."""
        return Path(self.directory.path)


class ExperienceSource(SourceDescription):
    """Makes the samples of each step. All methods are called from the trainer's thread, between `open` and `close`; work that `admit`
    started runs concurrently. Its `state()` is in every checkpoint.
    """

    roles: ClassVar[tuple[str, ...]] = ()
    """Roles with processes of its own, which are placed beside the models: `rollout`. Each is the key path of its engine's section, too."""
    on_request: ClassVar[frozenset[str]] = frozenset()
    """Columns that cost something: a step has them where something requires them."""
    follows: ClassVar[bool] = True
    """Whether the actor's weights generate its samples, so that the trainer has to publish them before it collects. If not, `Run.admit`
    and `Run.publish_weights` do nothing."""

    # -- planning: without torch, and without data -----------------------------------------------

    @classmethod
    def selects(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, Selection]:
        """Return the sections of the plugins that the source uses, by key path: the kind of each, and its section, None where none is
        selected.

        Args:
            config: the plugin's own config.
            facts: the facts of the run, with all plugins but the source's own.
        """
        return {}

    @classmethod
    @abstractmethod
    def rows(cls, config: PluginConfig, facts: PlanFacts) -> StepRows:
        """Return how many rows of the data a step takes, and of which kind.

        Raises:
            PlanError: the source does not support what the config asks for.
        """

    @classmethod
    @abstractmethod
    def gives(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the columns of a step before its first stage: those that always exist, and those of `facts.required` that the source can
        provide.
        """

    @classmethod
    def lacks(cls, config: PluginConfig, facts: PlanFacts, column: str) -> tuple[str, str] | None:
        """Return why a step does not have a column, and the fix; None where the source is not the reason."""
        return None

    @classmethod
    def age(cls, config: PluginConfig, facts: PlanFacts) -> int:
        """Return the most steps between the weights that made a sample and the step that trains on it. `PlanFacts.age` is the
        larger of this value and the trainer's `max_staleness`.
        """
        return 0

    @classmethod
    @abstractmethod
    def parts_of_step(cls, config: PluginConfig, facts: PlanFacts) -> Sequence[PlannedPart]:
        """Return the parts of a step that make its samples, as `dovetail plan` prints them."""

    @classmethod
    def publication(cls, config: PluginConfig, facts: PlanFacts) -> PlannedPart | None:
        """Return how the source gets the actor's weights; None where it takes none."""
        return None

    @classmethod
    def placed(
        cls, config: PluginConfig, facts: PlanFacts, pools: Mapping[str, Pool]
    ) -> SourcePlacement:
        """Return the placement of the source's processes.

        Args:
            config: the plugin's own config.
            facts: the facts of the run.
            pools: the pools of its roles.

        Raises:
            PlanError: the processes do not fit there, or exclude each other.
        """
        return SourcePlacement()

    @classmethod
    def memory(cls, config: PluginConfig, plan: Any) -> Mapping[str, Mapping[str, int]]:
        """Return the bytes that a rank of each of its roles uses, by purpose: the first entry is needed, the others are upper bounds.

        Raises:
            ModelError: a model can't be read.
        """
        return {}

    @classmethod
    def memory_rules(cls, config: PluginConfig, plan: Any) -> Mapping[str, MemoryRules]:
        """Return how the roles of `memory` share an accelerator with models; roles without a rule stay there, with their memory."""
        return {}

    # -- data --------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def read_tokenizer(cls, config: PluginConfig, facts: PlanFacts) -> Tokenizer:
        """Return the tokenizer of the run's model, with its chat template.

        Args:
            config: the plugin's own config.
            facts: the facts that `load` gets.

        Raises:
            ModelError: the tokenizer can't be read.
            ConfigError: a given argument is not used by the chat template.
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
            DataError, ModelError: what is missing or wrong, with file and row.
            ConfigError: the source does not support what the config asks for.
        """

    @classmethod
    def examine(
        cls, config: PluginConfig, facts: PlanFacts, data: Any, reward: Callable[..., Any] | None
    ) -> Iterator[str | Finding | DovetailError]:
        """Check the data together with the plugins that use it; yield a line for each thing that was checked, and problems, for `dovetail
        check`.

        Args:
            config: the plugin's own config.
            facts: the facts that `load` gets.
            data: the data that `load` returned; None where it failed.
            reward: the caller's function that scores every row; None where there is none.

        Raises:
            DovetailError: a fault after which nothing else can be examined.
        """
        if reward is not None:
            rows = cls.rows(config, facts).name
            yield ConfigError(
                f"a reward function is given, and a run on {rows} of the dataset scores nothing",
                hint="leave it out",
            )

    # -- life ----------------------------------------------------------------------------------------

    def launch(self, plan: Any, reward: Callable[..., Any] | None) -> None:
        """Start processes that load models. It may run in a thread, beside the start of the training models; `start` comes after it.

        Args:
            plan: the plan of the run; `context.runtime` starts processes.
            reward: see `examine`.
        """

    @abstractmethod
    def open(self, site: Site) -> None:
        """Start, once the run's models are in place."""

    @property
    def parts(self) -> Mapping[str, Plugin]:
        """The source's own plugins whose states checkpoints keep, by key path."""
        return {}

    @property
    def observers(self) -> Mapping[str, object]:
        """Observers that the source adds to the run, by a name for reports; see `dovetail.hooks`. Read between `start` and `open`."""
        return {}

    @property
    def outstanding(self) -> int:
        """The number of groups that were admitted and that no step has taken."""
        return 0

    def admit(self, groups: int, ask: StepAsk) -> None:
        """Start making groups that later steps take; return at once.

        Args:
            groups: the number of groups.
            ask: `step` is the next that takes groups.
        """

    @abstractmethod
    def collect(self, step: StepContext, ask: StepAsk) -> Experience:
        """Return the samples of a step: admitted groups first, then new ones for the rest.

        Args:
            step: the running step; the source adds metrics to `step.metrics` and the samples' tokens to `step.tokens`.
            ask: the step's request.

        Raises:
            StopRequested: a stop was asked for.
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
        """Take back the samples of a step that ended early, for the next step.

        Args:
            step: the number of the step.
            sound: True where the step was stopped; False after a failure, whose cause the samples may be, so that no checkpoint keeps them.
        """

    def publish(self) -> None:
        """Send the actor's weights to the processes that make samples, where they have changed; see `SentWeights.sending`.

        Raises:
            WeightSyncError: the weights did not arrive.
        """

    def rest(self) -> None:
        """Move off the accelerator, to make room for the training roles; `collect` and `validate` move back by themselves."""

    def validate(self, measure: Measure) -> dict[str, float]:
        """Return metrics of held-out rows; empty where there are none.

        Args:
            measure: see `Measure`.
        """
        return {}

    def fixed(self) -> Sequence[Batch]:
        """Return rows that no training changes and that are seen more than once, in batches: columns that follow from them and from frozen
        models alone are computed once. None by default.
        """
        return ()

    def summary(self) -> Mapping[str, Any]:
        """Return the accuracy of the run for its summary: `accuracy_metric`, `accuracy_before` and `accuracy_after`, None where unknown."""
        return dict.fromkeys(("accuracy_metric", "accuracy_before", "accuracy_after"))
