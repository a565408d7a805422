"""ExperienceSource: where the samples of a step come from, and what is done with new weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from dovetail.interfaces.plugin import Logger, Plugin
from dovetail.interfaces.runtime import Runtime, WorkerGroupHandle

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch
    from dovetail.interfaces.stage import Experience, StepContext
    from dovetail.sections import RunConfig

Key = tuple[int, int, int]
"""Epoch, row and attempt of a prompt or an example: its name in the ledger."""
Measure = Callable[["Batch"], Mapping[str, float]]
"""Returns what each role minimises on a batch, without gradient: the metrics of its objective, `val/loss` for `actor/loss`, and
`val/ROLE/…` for another role. Runs the stages that make the columns which objectives read."""


@attrs.frozen(kw_only=True)
class Ask:
    """What a step asks of its source."""

    step: int
    """The next step that takes samples."""
    due: int
    """The last step that may train on samples of the weights that the source holds now."""
    columns: frozenset[str] = frozenset()
    """Columns on request, such as `rollout_log_probs`."""


class SentWeights(Protocol):
    """The versions of the actor's weights, as a source sees them."""

    @property
    def version(self) -> int:
        """The last that was sent; 0 is what `model.path` holds."""
        ...

    @property
    def stale(self) -> bool:
        """Whether what this process has sent is not what the actor holds, as before it has sent any."""
        ...

    def sending(self, arrived: Callable[[int], bool]) -> AbstractContextManager[int]:
        """Return a context whose value is the version that is sent in its block.

        Args:
            arrived: whether a receiver holds a version; asked where the block fails, since no other weights may get its number.
        """
        ...


class Offloading(Protocol):
    """Which training roles are on the accelerator, as a source sees it."""

    def present(self, *roles: str) -> AbstractContextManager[None]:
        """Return a context in which these roles are on the accelerator."""
        ...

    def settle(self) -> None:
        """Have every role that is offloaded between its stages leave the accelerator."""
        ...


@attrs.frozen(kw_only=True)
class Site:
    """What a source is given of its run when it is opened."""

    config: RunConfig
    plan: Any
    """The run's Plan."""
    data: Any
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


class ExperienceSource(Plugin):
    """Gives the samples of each step. All methods are called from the trainer's thread, between `open` and `close`; what `admit` began goes
    on beside them. Its `state()` is in every checkpoint.
    """

    follows: ClassVar[bool] = True
    """Whether its samples come of the actor's weights, which the trainer has to publish before they are collected. Where not, `Run.admit`
    and `Run.publish_weights` do nothing."""

    def launch(self, plan: Any) -> None:
        """Start processes that load models. It may run in a thread, beside the start of the training models; `start` comes after it.

        Args:
            plan: of the run; `context.runtime` starts processes.
        """

    @abstractmethod
    def open(self, site: Site) -> None:
        """Begin, with the run's models in place."""

    @property
    def parts(self) -> Mapping[str, Plugin]:
        """Plugins of its own whose states checkpoints keep, too, by their key path."""
        return {}

    @property
    def outstanding(self) -> int:
        """Groups that were admitted and that no step has taken."""
        return 0

    def admit(self, groups: int, ask: Ask) -> None:
        """Begin to make groups that later steps take; return at once.

        Args:
            groups: how many.
            ask: `step` is the next that takes groups.
        """

    @abstractmethod
    def collect(self, step: StepContext, ask: Ask) -> Experience:
        """Return the samples of a step: the groups that were admitted first, and what is missing of them.

        Args:
            step: the step that is under way; metrics go to `step.metrics`, the tokens of its samples to `step.tokens`.
            ask: what it asks for.

        Raises:
            StopRequested: a stop was asked for.
        """

    @abstractmethod
    def settle(self, step: int, trained: Collection[Key], left_out: Mapping[Key, str]) -> None:
        """Account for what a step took.

        Args:
            step: its number.
            trained: what it was trained on.
            left_out: what was left out of the step, and why.
        """

    @abstractmethod
    def give_back(self, step: int, *, sound: bool) -> None:
        """Take back what a step took that has ended early: the next one gets it.

        Args:
            step: its number.
            sound: whether it was stopped. After a failure, whose cause its samples may be, no checkpoint keeps them.
        """

    def publish(self) -> None:
        """Send the actor's weights to where samples are made, where they have moved; see `SentWeights.sending`.

        Raises:
            WeightSyncError: they did not arrive.
        """

    def rest(self) -> None:
        """Leave the accelerator to the training roles; `collect` and `validate` come back by themselves."""

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
        """Return the accuracy of the run for its summary: `accuracy_metric`, `accuracy_before` and `accuracy_after`, each None where there
        is none.
        """
        return dict.fromkeys(("accuracy_metric", "accuracy_before", "accuracy_after"))
