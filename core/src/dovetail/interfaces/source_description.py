"""SourceDescription: what commands and the plugin lock ask of a source of experience."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.errors import PlanError
from dovetail.interfaces.plugin import Plugin, PluginConfig

if TYPE_CHECKING:
    from dovetail.interfaces.runtime import PluginRef
    from dovetail.interfaces.stage import PlanFacts


@attrs.frozen(kw_only=True)
class PlanNote:
    """What a source says of a plan besides its parts, as `dovetail plan` prints it."""

    name: str
    """Its key under `--json`."""
    text: str
    """A line for people, or several."""
    value: Any
    """The same as plain containers."""
    warnings: tuple[str, ...] = ()
    """What the note does not take into account."""


@attrs.frozen(kw_only=True)
class RowVerdict:
    """What a source makes of the reference answer of a row."""

    row: int
    """Its number in the file, from 0."""
    where: str
    """The row, as messages name it."""
    text: str
    """The score, or why there is none, and the answer."""
    score: float | None
    """None where there is none."""


class SourceDescription(Plugin):
    """Says of plans, rows and runs what `dovetail plan` and `dovetail data` print. By default there is nothing to say."""

    @classmethod
    def notes(cls, config: PluginConfig, plan: Any) -> Iterator[PlanNote]:
        """Yield what else there is to say of a plan: how far samples are made ahead, what an update of weights carries.

        Raises:
            ModelError: a model can't be read.
        """
        yield from ()

    @classmethod
    def forecast(cls, config: PluginConfig, plan: Any, run: Path) -> PlanNote:
        """Return the seconds that steps of a plan will take, as the measurements of a run say.

        Args:
            config: its own.
            plan: of the run to come.
            run: the run directory of the other.

        Raises:
            PlanError: the plan makes nothing whose seconds could be predicted, or the run did not measure what it takes.
            RunDirectoryError: there is no such run.
        """
        raise PlanError(
            f"{plan.facts.plugins['trainer'].title} takes {plan.counts.of.name} of a dataset: there is no rollout to wait for",
            hint="leave --from-run out",
        )

    @classmethod
    def named_by_rows(
        cls, config: PluginConfig, facts: PlanFacts, data: Any
    ) -> Sequence[PluginRef]:
        """Return the plugins that rows of the data select by themselves, which the lock of the run keeps.

        Args:
            config: its own.
            facts: as for `load`.
            data: what `load` returned.
        """
        return ()

    @classmethod
    def verdicts(
        cls, config: PluginConfig, facts: PlanFacts, rows: Iterable[Any]
    ) -> Iterator[RowVerdict]:
        """Yield what the source makes of the reference answers of rows, for `dovetail data`; a row without one is passed over.

        Args:
            config: its own.
            facts: as for `load`.
            rows: of the dataset, numbered, as `dovetail data` reads them.

        Raises:
            DovetailError: they can't be judged.
        """
        yield from ()
