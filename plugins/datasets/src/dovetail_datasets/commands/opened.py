"""OpenedData: the data of a config, or of a single file, for the commands `look` and `check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import attrs

from dovetail.config import load_config
from dovetail.errors import ConfigError
from dovetail.interfaces import BadRow, Prompt, RowSet, RowVerdict, SourceData
from dovetail.planning import source_facts
from dovetail.run import load_data
from dovetail.sections import RunConfig
from dovetail_datasets.cached_examples import CachedExamples, StreamedExamples
from dovetail_datasets.loading import configured_dataset, datasets_of, read_tokenizer
from dovetail_datasets.rows import CheckedGroups, NumberedRow, numbered

ANY_NUMBER = 10**12
"""A limit of bad rows that no dataset reaches, so that bad rows are listed and do not end the command."""
_EXAMPLES: Mapping[frozenset[str], tuple[str, ...]] = {
    frozenset({"chosen", "rejected"}): ("trainer.examples=preferences", "actor.objective=dpo"),
    frozenset({"prompt", "label"}): (
        "trainer.examples=unpaired_preferences",
        "actor.objective=kto",
    ),
    frozenset({"messages"}): (),
    frozenset({"prompt", "response"}): (),
    frozenset({"prompt", "completion"}): (),
}
"""Columns that identify a kind of example → the settings that train on this kind. The first entry that matches counts."""


@attrs.frozen(kw_only=True)
class OpenedData:
    """The data that a config names, loaded as for a run."""

    config: RunConfig
    data: SourceData

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the first training dataset."""
        ((files, _), *_) = datasets_of(self.config.data).values()
        return files

    def rows(self, first: int) -> Iterator[NumberedRow]:
        """Yield the unchanged rows of the first training dataset, beginning with row `first`, counted from 0."""
        groups = CheckedGroups(configured_dataset(self.config, self.data.tokenizer), self.files)
        before = 0
        for group, size in enumerate(groups.sizes):
            start = max(first - before, 0)
            if start < size:
                yield from numbered(groups, group, start, before + start)
            before += size

    def verdicts(self, rows: Iterable[NumberedRow]) -> Iterator[RowVerdict]:
        """Yield the score of each row's reference answer, as the run's experience source gives it; for errors see
        `ExperienceSource.verdicts`.
        """
        facts = source_facts(self.config)
        source = facts.plugins["source"]
        found: Iterator[RowVerdict] = source.cls.verdicts(source.config, facts, rows)
        return found

    def became(self, row: NumberedRow) -> Prompt | BadRow | None:
        """Return the prompt or example made from a row of the first training dataset; a BadRow if it is bad, None if it is too long."""
        found = self.data.train.prompts
        if isinstance(found, CachedExamples):
            return found.take(row.number)
        own = (p for p in found if p.dataset == found[0].dataset and p.index == row.number)
        bad = (each for each in self.data.train.bad if each.where == row.where)
        return next(own, next(bad, None))


def opened(config: tuple[str, ...], overrides: Sequence[str]) -> OpenedData:
    """Read the data of a config, or of a single dataset file; the columns of the file then determine the kind of its rows.

    Args:
        config: the path of a config or of a dataset's file, as a tuple of one text; empty if all settings are in `overrides`.
        overrides: settings `key=value`; for a file at least `model.path=`.

    Raises:
        DataError, ConfigError, ModelError: see `load_data`.
    """
    given = [*overrides, f"data.max_bad_rows={ANY_NUMBER}"]
    if config and Path(config[0]).suffix.lower() not in (".yaml", ".yml"):
        if not any(each.startswith("model.path=") for each in overrides):
            raise ConfigError(
                f"the file {config[0]} is not a config (.yaml), so it is read as a dataset, which needs model.path for the tokenizer and the chat template",
                hint="add model.path=DIRECTORY, or name a config (.yaml) in place of the file",
            )
        given = [f"data.train_files={config[0]}", *given]
        config = ()
        if not any(each.startswith(("trainer=", "trainer.")) for each in overrides):
            given = [*_kind(load_config((), given).config), *given]
    loaded = load_config(config, given).config
    return OpenedData(config=loaded, data=load_data(loaded))


def examples_of(rows: RowSet) -> Iterator[Prompt]:
    """Yield the prompts or examples of a row set; of streamed rows, those read so far."""
    prompts = rows.prompts
    return prompts.shards.opened() if isinstance(prompts, StreamedExamples) else iter(prompts)


def _kind(config: RunConfig) -> tuple[str, ...]:
    """Return the settings for the kind of example that the columns of the first rows identify; empty for prompts."""
    groups = CheckedGroups(
        configured_dataset(config, read_tokenizer(config)), config.data.train_files
    )
    head = (row for _, row in islice(groups.read(0), 9) if isinstance(row, Mapping))
    columns = {key for row in head for key in row}
    for needed, settings in _EXAMPLES.items():
        if needed <= columns and "reward_model" not in columns:
            return ("trainer.name=supervised", *settings)
    return ()
