"""Loads the examples of datasets before the run starts, or streams them as steps take them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path

import attrs
import numpy as np

from dovetail.errors import DataError
from dovetail.interfaces import DatasetShape, DatasetSource, Examples, Prompt, RowGroups, Tokenizer
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.cached_examples import (
    CachedExamples,
    ExampleRows,
    ExampleShards,
    StreamedExamples,
)
from dovetail_datasets.examples import ExampleMaker
from dovetail_datasets.left_out import Tally
from dovetail_datasets.limits import Truncation, no_examples_left
from dovetail_datasets.prompts import PromptSet
from dovetail_datasets.rows import CheckedGroups, FileRows, by_file, check_bad_rows, numbered
from dovetail_datasets.shards import SHARD_ROWS, ShardFolder, cache_folder

STREAMED_FROM = 2**26
"""Estimated characters in all rows above which `data.streaming: auto` streams; a process tokenises about a million per second."""
HEADS, HEAD = 4, 256
"""Number of row groups (`HEADS`), and number of first rows of each (`HEAD`), from which a dataset's columns are determined."""
PROCESSES_FROM = 8 * SHARD_ROWS
"""The number of uncached rows from which several processes are used, since a process takes seconds to start."""
MOST_PROCESSES = 8


@attrs.frozen(kw_only=True, eq=False)
class ExampleSet(PromptSet):
    """Examples of a dataset or of a mixture."""

    heads: tuple[Prompt, ...]
    """One example of each dataset from which at least one was read."""
    images: bool
    """Whether any example that was read has an image."""

    @property
    def has_images(self) -> bool:
        return self.images

    def one_of_each(self) -> Sequence[Prompt]:
        return self.heads


def load_examples(
    source: DatasetSource,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    section: DataSection,
    model: ModelSection,
    kind: Examples,
    media_dir: Path | None = None,
) -> PromptSet:
    """Read, check, render and tokenise every row of one dataset; see `load_datasets`."""
    whole = attrs.evolve(section, streaming=False)
    return load_datasets(source, {"": (paths, section)}, tokenizer, whole, model, kind, media_dir)


def load_datasets(
    source: DatasetSource,
    datasets: Mapping[str, tuple[Sequence[str], DataSection]],
    tokenizer: Tokenizer,
    section: DataSection,
    model: ModelSection,
    kind: Examples,
    media_dir: Path | None = None,
) -> PromptSet:
    """Read, check, render and tokenise every row; streamed rows after the first ones are processed when they are taken.

    Args:
        source: the dataset source that reads the files.
        datasets: the files or patterns and the section of each dataset, by name.
        tokenizer: a Hugging Face tokenizer.
        section: the data section: limits and the handling of longer rows, weights of datasets, streaming, the cache.
        model: the section of the model that takes the examples.
        kind: `conversations`, `preferences` or `unpaired_preferences`.
        media_dir: see `load_prompts`.

    Returns:
        The set of examples; `prompts` holds them.

    Raises:
        DataError: a file, a column or an image is bad, more than `section.max_bad_rows` rows are bad, no row is left, or the template's
            `generation` blocks mark nothing. A row is bad if the template rewrites its earlier turns, if the model has no embedding
            for one of its tokens, or if it is too long and such rows are refused.
        ModelError: the tokenizer lacks a chat template for messages, or the model takes no images and rows have some.
        ConfigError: template arguments are set for raw texts, the template's `generation` blocks can't be located, or truncation is
            configured for preferences.
    """
    groups = {name: CheckedGroups(source, paths) for name, (paths, _) in datasets.items()}
    heads = {name: _head(groups[name], paths) for name, (paths, _) in datasets.items()}
    text = int(sum(_text(heads[name]) * sum(rows.sizes) for name, rows in groups.items()))
    streamed = section.streaming is True or (section.streaming == "auto" and text > STREAMED_FROM)
    if streamed:
        tokenizer = deepcopy(tokenizer)  # not thread-safe; the thread that reads ahead gets its own
    made: list[ExampleRows] = []
    offset = 0
    for name, (paths, own) in datasets.items():
        rows, folder = groups[name], None
        make = ExampleMaker(heads[name], tokenizer, own, model, kind, media_dir)
        size, mixture = sum(rows.sizes), section.mixture.get(name)
        if size > SHARD_ROWS:
            follows = {**make.follows_from(), "files": list(paths), "rows": rows.digest()}
            folder = cache_folder(section.cache_dir, tokenizer, follows)
        shape = DatasetShape(
            name=name,
            size=size,
            weight=mixture.weight if mixture else None,
            groups=tuple(rows.sizes),
        )
        kept = ShardFolder(folder) if folder is not None else None
        made.append(ExampleRows(shape=shape, offset=offset, rows=rows, make=make, folder=kept))
        offset += size
    shards = ExampleShards(made)
    try:
        found = _read(shards, section, streamed=streamed)
    finally:
        shards.close()
    if not len(found):
        if found.bad:
            raise found.bad[0].error
        named = [path for paths, _ in datasets.values() for path in paths]
        raise no_examples_left(kind, shards.rows, named, section)
    if section.streaming == "auto" and streamed:
        took = f"{text / 1e6:,.0f} MB of text take a process more than a minute to tokenise"
        return attrs.evolve(found, streamed=f"{found.streamed}: {took} (data.streaming=auto)")
    return found


def _read(shards: ExampleShards, section: DataSection, *, streamed: bool) -> ExampleSet:
    """Make the set of examples. All shards are read now; if `streamed`, only a few of each dataset, to check them before the run starts."""
    datasets = shards.datasets
    processes = section.processes or min(_cores(), MOST_PROCESSES)
    if not streamed and shards.missing() >= PROCESSES_FROM:
        shards.processes = processes
    read = shards.read(shards.spread() if streamed else None)
    sizes, tallies = [0] * len(datasets), [Tally() for _ in datasets]
    heads: dict[int, Prompt] = {}
    for dataset, shard in read:
        sizes[dataset] += len(shard.rows)
        tallies[dataset].merge(shard.facts.left_out)
        if len(shard.rows) and dataset not in heads:
            name = datasets[dataset].shape.name
            heads[dataset] = attrs.evolve(shard.example(0), dataset=name)
    facts = [shard.facts for _, shard in read]
    bad = tuple(row for each in facts for row in each.bad)
    for number, row in enumerate(bad, start=1):
        check_bad_rows(row, number, section.max_bad_rows)
    images = any(shard.has_images for _, shard in read)
    digests = [each.digest for each in facts]
    examples: CachedExamples
    if streamed:
        files = [each.rows.digest() for each in datasets]
        examples = StreamedExamples(shards, files + digests, section.max_bad_rows)
        shards.processes = processes if shards.rows >= PROCESSES_FROM else 1
        for each in datasets:
            # Engines are checked before the first step, by the rows read until then. If none has images, later rows must not have any.
            each.make.text_alone = not images
    else:
        rows = [datasets[dataset].offset + shard.rows for dataset, shard in read]
        examples = CachedExamples(shards, np.concatenate(rows), digests)
    shapes = [
        each.shape if streamed else attrs.evolve(each.shape, size=size, groups=None)
        for each, size in zip(datasets, sizes, strict=True)
    ]
    return ExampleSet(
        prompts=examples,
        filtered_overlong=sum(each.overlong for each in facts),
        truncated=sum((each.truncated for each in facts), Truncation()),
        spelled=sum(each.spelled for each in facts),
        datasets=tuple(shapes) if streamed or section.mixture else (),
        left_out=tuple(
            f"{shape.name}: {what}" if shape.name else what
            for shape, tally in zip(shapes, tallies, strict=True)
            for what in tally.notes()
        ),
        bad=bad,
        streamed=f"{sum(f.rows for f in facts):,} of {shards.rows:,} were read" if streamed else "",
        heads=tuple(heads[number] for number in sorted(heads)),
        images=images,
    )


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(files: Sequence[FileRows]) -> float:
    """Return the average number of characters of a row, without images."""
    sizes = [
        len(json.dumps(row, default=lambda _: "", ensure_ascii=False))
        for file in files
        for row in file.rows
    ]
    return sum(sizes) / len(sizes)


def _head(groups: RowGroups, paths: Sequence[str]) -> list[FileRows]:
    """Return the first rows of the first group and of some others, from which the columns are determined.

    Raises:
        DataError: none of these rows can be read.
    """
    count = len(groups.sizes)
    chosen = sorted({place * count // HEADS for place in range(HEADS)})
    rows = [row for group in chosen for row in islice(numbered(groups, group, 0, 0), HEAD)]
    files = by_file(rows, paths)
    if not files:
        raise next(row.columns for row in rows if isinstance(row.columns, DataError))
    return files
