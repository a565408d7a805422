"""Loads the training rows and held-out rows of a run, according to the config."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError
from dovetail.interfaces import DatasetSource, PluginContext, SourceData, Tokenizer
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import DataSection, RunConfig
from dovetail_datasets.message_form import Tools
from dovetail_datasets.mixtures import mixed
from dovetail_datasets.prompts import PromptSet, load_prompts
from dovetail_datasets.tokenizer import load_tokenizer


def read_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a config, with its chat template; for errors see `load_tokenizer`.

    Afterwards transformers shows no progress bars, and its log records are handled like those of other libraries.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.disable_default_handler()
    logging.enable_propagation()
    return load_tokenizer(config.model, chat_template_args=config.data.chat_template_args)


def data_of(
    tokenizer: Tokenizer,
    train: PromptSet,
    val: PromptSet | None,
    section: DataSection,
    *,
    rows_are: str,
    limits: str,
) -> SourceData:
    """Return the data of a run, with notes on its rows.

    Args:
        tokenizer: the tokenizer of the run.
        train: the training rows.
        val: the held-out rows, or None.
        section: the data section of these rows.
        rows_are: the plural noun for rows, for messages.
        limits: the length limits, as text for messages.
    """
    named = (("training", train), ("held-out", val))
    notes = (
        rows.notes(f"{what} {rows_are}", limits, section)
        for what, rows in named
        if rows is not None
    )
    return SourceData(
        tokenizer=tokenizer,
        train=train,
        val=val,
        rows_are=rows_are,
        limits=limits,
        notes=tuple(chain.from_iterable(notes)),
    )


def load_prompt_data(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    tools: Tools = None,
    rows_are: str = "prompts",
) -> SourceData:
    """Read the training prompts and the held-out ones; for errors see `load_prompts`.

    Args:
        config: the config of the run.
        tokenizer: the tokenizer of its model.
        tools: schemas of the functions that the chat template is given.
        rows_are: the plural noun for rows, for messages.

    Raises:
        ConfigError: no training files are named, streaming is configured, or `data.max_length` is set.
    """
    if config.data.streaming is True:
        raise ConfigError(
            f"data.streaming=true is not possible for {rows_are}, which are all read before the run starts",
            hint="set data.streaming=false",
        )
    if config.data.max_length is not None:
        raise ConfigError(
            f"data.max_length={config.data.max_length} limits only the examples of a dataset, but this run trains on {rows_are}",
            hint="leave data.max_length out, and set data.max_prompt_length and data.max_response_length",
        )
    dataset, section = configured_dataset(config, tokenizer), config.data
    read = partial(read_prompts, config, tokenizer, source=dataset, tools=tools)
    refuse_no_files(section)
    datasets = {name: read(files, section=of) for name, (files, of) in datasets_of(section).items()}
    return data_of(
        tokenizer,
        mixed(datasets, section) if section.mixture else datasets[""],
        read(section.val_files) if section.val_files else None,
        section,
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
        config: the config of the run.
        tokenizer: the tokenizer of its model.
        paths: files or patterns.
        source: the dataset source; by default the config's.
        section: the section with the columns and the length limits; by default `config.data`.
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
    """Refuse a section that names no training files, or names them twice.

    Raises:
        ConfigError: no files are named, or both files and a mixture are.
    """
    if section.train_files and section.mixture:
        raise ConfigError(
            "data.train_files and data.mixture both name training files; expected only one of the two",
            hint="name all training files in data.mixture, and leave data.train_files out",
        )
    if not section.training_files:
        raise ConfigError(
            "data.train_files names no file; expected at least one",
            hint="set data.train_files=path/to/train.parquet",
        )


def datasets_of(section: DataSection) -> dict[str, tuple[tuple[str, ...], DataSection]]:
    """Return the files and the data section of each training dataset, by its name in the mixture.

    Without a mixture, `section.train_files` are the only dataset, and its name is empty.
    """
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
    """Return the directory for copies of images that have no file of their own."""
    return Path(config.data.media_dir or Path(config.output_dir) / "media")
