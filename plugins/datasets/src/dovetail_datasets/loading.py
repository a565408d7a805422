"""The data of a run: rows to train on and rows that are held out, read as the config says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from dovetail.data.message_form import Tools
from dovetail.data.mixtures import mixed
from dovetail.data.prompts import PromptSet, load_prompts
from dovetail.data.rows import BadRow
from dovetail.errors import ConfigError
from dovetail.interfaces.data import DatasetSource
from dovetail.interfaces.plugin import PluginContext, Tokenizer
from dovetail.plugins.load import make_plugin, ref_for
from dovetail.sections import DataSection, RunConfig


@attrs.frozen(kw_only=True, eq=False)
class Data:
    """Tokenizer and rows."""

    tokenizer: Tokenizer
    train: PromptSet
    val: PromptSet | None
    """Held out."""
    rows_are: str = "prompts"
    """What rows are called, for people."""
    limits: str = ""
    """How long rows may be, for people."""

    @property
    def sets(self) -> tuple[PromptSet, ...]:
        """The rows to train on, and those that are held out where there are any."""
        return (self.train,) if self.val is None else (self.train, self.val)

    @property
    def prompts(self) -> Iterator[Any]:
        """All rows, to train on and held out."""
        return chain.from_iterable(rows.prompts for rows in self.sets)

    @property
    def bad(self) -> Iterator[BadRow]:
        """Rows that were left out because something is wrong with them; of streamed rows, those that were read."""
        return chain.from_iterable(rows.bad for rows in self.sets)

    @property
    def has_images(self) -> bool:
        """Whether a row has an image."""
        return any(rows.has_images for rows in self.sets)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the chat template leaves out of the rows, a sentence each."""
        val = () if self.val is None else self.val.left_out
        return (*self.train.left_out, *(f"held-out rows: {what}" for what in val))


def load_prompt_data(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    tools: Tools = None,
    rows_are: str = "prompts",
) -> Data:
    """Read the prompts to train on, and those that are held out; for errors see `load_prompts`.

    Args:
        config: of the run.
        tokenizer: of its model.
        tools: schemas of the functions that the chat template is given.
        rows_are: what rows are called, for people.

    Raises:
        ConfigError: no training files are named, they are to be streamed, or `data.max_length` is set.
    """
    if config.data.streaming is True:
        raise ConfigError(
            f"data.streaming=true, and {rows_are} are read whole", hint="set data.streaming=false"
        )
    if config.data.max_length is not None:
        raise ConfigError(
            f"data.max_length={config.data.max_length} bounds examples of a dataset, and this run learns from {rows_are}",
            hint="leave it out: data.max_prompt_length and data.max_response_length bound them",
        )
    dataset, section = configured_dataset(config, tokenizer), config.data
    read = partial(read_prompts, config, tokenizer, source=dataset, tools=tools)
    refuse_no_files(section)
    datasets = {name: read(files, section=of) for name, (files, of) in datasets_of(section).items()}
    return Data(
        tokenizer=tokenizer,
        train=mixed(datasets, section) if section.mixture else datasets[""],
        val=read(section.val_files) if section.val_files else None,
        rows_are=rows_are,
        limits=f"{section.max_prompt_length} tokens",
    )


def read_prompts(
    config: RunConfig,
    tokenizer: Tokenizer,
    paths: Sequence[str],
    *,
    source: DatasetSource | None = None,
    section: DataSection | None = None,
    tools: Tools = None,
) -> PromptSet:
    """Read prompts from files, as a run does; for errors see `load_prompts`.

    Args:
        config: of the run.
        tokenizer: of its model.
        paths: files or patterns.
        source: reads them; what the config names where absent.
        section: says what their columns are, and how long they may be; `config.data` where absent.
        tools: schemas of the functions that the chat template is given.
    """
    return load_prompts(
        source or configured_dataset(config, tokenizer),
        paths,
        tokenizer,
        section or config.data,
        config.model,
        media_dir=media_dir(config),
        tools=tools,
    )


def refuse_no_files(section: DataSection) -> None:
    """Refuse a section that names no training files.

    Raises:
        ConfigError: it names none.
    """
    if not section.training_files:
        raise ConfigError(
            "data.train_files names no file", hint="set data.train_files=path/to/train.parquet"
        )


def datasets_of(section: DataSection) -> dict[str, tuple[tuple[str, ...], DataSection]]:
    """Return files and section of each training dataset by its name in the mixture; without one, the one that there is."""
    if not section.mixture:
        return {"": (section.train_files, section)}
    return {
        name: (each.files, attrs.evolve(section, prompt_key=each.prompt_key or section.prompt_key))
        for name, each in section.mixture.items()
    }


def configured_dataset(config: RunConfig, tokenizer: Tokenizer) -> DatasetSource:
    """Return the dataset source that a config names."""
    context = PluginContext(seed=config.seed, tokenizer=tokenizer, cache_dir=config.data.cache_dir)
    made: Any = make_plugin(ref_for("dataset", config.data.source), context)
    source: DatasetSource = made
    return source


def media_dir(config: RunConfig) -> Path:
    """Return where images without a file of their own are written."""
    return Path(config.data.media_dir or Path(config.output_dir) / "media")
