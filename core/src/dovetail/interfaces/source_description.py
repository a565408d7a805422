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
    """A source's note on a plan, as `dovetail plan` prints it."""

    name: str
    """Its key under `--json`."""
    text: str
    """The note as text, of one or several lines."""
    value: Any
    """The note as plain containers."""
    warnings: tuple[str, ...] = ()
    """What the note does not take into account."""


@attrs.frozen(kw_only=True)
class RowVerdict:
    """A source's score of the reference answer of a row."""

    row: int
    """Number of the row in the file, from 0."""
    where: str
    """Name of the row in messages."""
    text: str
    """The score, or why there is none, and the answer."""
    score: float | None
    """The score; None where there is none."""


class SourceDescription(Plugin):
    """Describes plans, rows and runs for `dovetail plan` and `dovetail data`. The default has nothing to add."""

    @classmethod
    def notes(cls, config: PluginConfig, plan: Any) -> Iterator[PlanNote]:
        """Yield further lines for a plan: how far ahead samples are made, what a weight update contains.

        Raises:
            ModelError: a model can't be read.
        """
        yield from ()

    @classmethod
    def forecast(cls, config: PluginConfig, plan: Any, run: Path) -> PlanNote:
        """Return the seconds that each step of a plan will take, predicted from the measurements of an earlier run.

        Args:
            config: the plugin's own config.
            plan: the plan of the run to come.
            run: the run directory of the earlier run.

        Raises:
            PlanError: the plan has nothing to predict, or the run lacks a measurement.
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
            config: the plugin's own config.
            facts: the facts that `load` gets.
            data: the data that `load` returned.
        """
        return ()

    @classmethod
    def verdicts(
        cls, config: PluginConfig, facts: PlanFacts, rows: Iterable[Any]
    ) -> Iterator[RowVerdict]:
        """Yield the scores of the rows' own reference answers, for `dovetail data`; rows without one are skipped.

        Args:
            config: the plugin's own config.
            facts: the facts that `load` gets.
            rows: the rows of the dataset, numbered, as `dovetail data` reads them.

        Raises:
            DovetailError: the answers can't be scored.
        """
        yield from ()
