"""SourceDescription: the methods of a source that commands and the plugin lock use."""

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
    """Key of the note in the output of `--json`."""
    text: str
    """The note as text, of one or several lines."""
    value: Any
    """The note as plain containers."""
    warnings: tuple[str, ...] = ()
    """Facts that the note does not take into account."""


@attrs.frozen(kw_only=True)
class RowVerdict:
    """A source's score for a reference answer of a row of data, for `dovetail data`."""

    row: int
    """Index of the row in the dataset, from 0."""
    where: str
    """Name of the row in messages."""
    text: str
    """Text for people: the score, or why there is none, and the answer."""
    score: float | None
    """The score; None if there is none."""


class SourceDescription(Plugin):
    """Describes plans, rows and runs for `dovetail plan` and `dovetail data`. By default, the methods add nothing."""

    @classmethod
    def notes(cls, config: PluginConfig, plan: Any) -> Iterator[PlanNote]:
        """Yield further notes on a plan, such as how far ahead samples are made, or what a weight update contains.

        Raises:
            ModelError: a model can't be read.
        """
        yield from ()

    @classmethod
    def forecast(cls, config: PluginConfig, plan: Any, run: Path) -> PlanNote:
        """Return a note with the predicted seconds of each step of a plan, from the measurements of an earlier run.

        Args:
            config: the plugin's own config.
            plan: the plan of the run to come.
            run: the run directory of the earlier run.

        Raises:
            PlanError: the plan has nothing to predict, or the run lacks a measurement.
            RunDirectoryError: the run directory does not exist.
        """
        raise PlanError(
            f"the time of a step can't be predicted: {plan.facts.plugins['trainer'].title} trains on {plan.counts.of.name} of a dataset, without a rollout",
            hint="leave --from-run out",
        )

    @classmethod
    def named_by_rows(
        cls, config: PluginConfig, facts: PlanFacts, data: Any
    ) -> Sequence[PluginRef]:
        """Return the plugins that rows of the data select, for the record of the run's plugins, `plugins.lock.json`.

        Args:
            config: the plugin's own config.
            facts: the facts that `load` receives.
            data: the data that `load` returned.
        """
        return ()

    @classmethod
    def verdicts(
        cls, config: PluginConfig, facts: PlanFacts, rows: Iterable[Any]
    ) -> Iterator[RowVerdict]:
        """Yield the scores of the rows' reference answers, for `dovetail data`; rows without an answer are skipped.

        Args:
            config: the plugin's own config.
            facts: the facts that `load` receives.
            rows: the dataset's rows as `dovetail data` reads them: objects with the row's index, its name in messages and its columns.

        Raises:
            DovetailError: the answers can't be scored.
        """
        yield from ()
