"""The data of a run: tokenizer and prompts, the loader over them, and the plan with their counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from dovetail.data.examples import load_examples
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.data.prompts import PromptSet, load_prompts
from dovetail.data.streaming import stream_examples
from dovetail.errors import ConfigError
from dovetail.interfaces.data import DatasetSource, Prompt, Sampler
from dovetail.interfaces.plugin import PluginContext, Tokenizer
from dovetail.interfaces.trainer import Examples
from dovetail.planning.plan import Plan, make_plan
from dovetail.planning.resolved_plugins import examples_of_config
from dovetail.plugins.load import make_plugin, ref_for
from dovetail.run.data_checks import CheckedDataset, check_sampler
from dovetail.sections import DataSection, RunConfig


@attrs.frozen(kw_only=True, eq=False)
class Data:
    """Tokenizer and prompts, or what the trainer takes of the dataset in their place."""

    tokenizer: Tokenizer
    train: PromptSet
    val: PromptSet | None
    kind: Examples = "prompts"
    """What they are."""

    @property
    def prompts(self) -> Iterator[Prompt]:
        """All of them, to train on and held out."""
        return chain(self.train.prompts, self.val.prompts if self.val is not None else ())

    @property
    def has_images(self) -> bool:
        """Whether a prompt has an image, to train on or held out."""
        return any(prompts is not None and prompts.has_images for prompts in (self.train, self.val))

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the chat template leaves out of the rows, a sentence each."""
        val = () if self.val is None else self.val.left_out
        return (*self.train.left_out, *(f"held-out rows: {what}" for what in val))


def load_data(config: RunConfig) -> Data:
    """Read the tokenizer and every prompt.

    Raises:
        DataError, ModelError: what is missing or wrong, with file and row.
        ConfigError: no training files are named, or the chat template does not read an argument that is given.
    """
    from dovetail.data.mixtures import mixed

    section = config.data
    if not section.training_files:
        raise ConfigError(
            "data.train_files names no file", hint="set data.train_files=path/to/train.parquet"
        )
    if section.train_files and section.mixture:
        raise ConfigError(
            "data.train_files and data.mixture both name training files",
            hint="name all of them in data.mixture",
        )
    kind = examples_of_config(config)
    if section.streaming and kind == "prompts":
        raise ConfigError(
            "data.streaming=true, and the prompts of a run that generates are read whole",
            hint="set data.streaming=false",
        )
    tokenizer = read_tokenizer(config)

    source = _source(config, tokenizer)

    def read(paths: tuple[str, ...], section: DataSection = section) -> PromptSet:
        if kind == "prompts":
            return read_prompts(attrs.evolve(config, data=section), tokenizer, paths, source)
        return load_examples(
            source, paths, tokenizer, section, config.model, kind, _media_dir(config)
        )

    if section.streaming:
        train = _streamed(config, source, tokenizer, kind)
    elif section.mixture:
        train = mixed({name: read(*of) for name, of in _datasets(section).items()}, section)
    else:
        train = read(section.train_files)
    val = read(section.val_files) if section.val_files else None
    return Data(tokenizer=tokenizer, train=train, val=val, kind=kind)


def _datasets(section: DataSection) -> dict[str, tuple[tuple[str, ...], DataSection]]:
    """Files and section of each training dataset by its name in the mixture; without one, the one that there is."""
    if not section.mixture:
        return {"": (section.train_files, section)}
    return {
        name: (each.files, attrs.evolve(section, prompt_key=each.prompt_key or section.prompt_key))
        for name, each in section.mixture.items()
    }


def _streamed(
    config: RunConfig, source: DatasetSource, tokenizer: Tokenizer, kind: Examples
) -> PromptSet:
    # A tokenizer of the thread's own.
    own = deepcopy(tokenizer)
    return stream_examples(
        {
            name: (source.stream(files), files, section)
            for name, (files, section) in _datasets(config.data).items()
        },
        {name: each.weight for name, each in config.data.mixture.items()},
        own,
        config.model,
        kind,
        _media_dir(config),
    )


def read_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a config, with its chat template; for errors see `load_tokenizer`."""
    from dovetail.data.tokenizer import load_tokenizer

    _no_progress_bars()
    return load_tokenizer(config.model, chat_template_args=config.data.chat_template_args)


def read_prompts(
    config: RunConfig,
    tokenizer: Tokenizer,
    paths: Sequence[str],
    source: DatasetSource | None = None,
) -> PromptSet:
    """Read prompts from files, as a run does; for errors see `load_prompts`.

    Args:
        config: of the run.
        tokenizer: of its model.
        paths: files or patterns.
        source: reads them; what the config names where absent.
    """
    from dovetail.rollouts.agent_loops import chat_tools

    return load_prompts(
        source or _source(config, tokenizer),
        paths,
        tokenizer,
        config.data,
        config.model,
        media_dir=_media_dir(config),
        tools=chat_tools(config, tokenizer),
    )


def make_loader(config: RunConfig, data: Data, sampler: Sampler) -> tuple[PromptLoader, Ledger]:
    """Return the loader of the training data, and the ledger of what it issues.

    Raises:
        PluginBrokenError: the sampler gives no permutation, or another one when it is asked again.
    """
    train, ledger = data.train, Ledger()
    check_sampler(sampler, len(train))
    loader = PromptLoader(
        train.prompts,
        sampler,
        config.data.train_batch_size,
        ledger,
        datasets=train.datasets,
        window=config.data.shuffle_window,
    )
    return loader, ledger


def plan_from_data(config: RunConfig, data: Data) -> Plan:
    """Return the plan with its counts resolved from the data."""
    return make_plan(
        config, prompts=len(data.train.prompts), images=data.has_images, left_out=data.left_out
    )


def _media_dir(config: RunConfig) -> Path:
    """Where images without a file of their own are written."""
    return Path(config.data.media_dir or Path(config.output_dir) / "media")


def _source(config: RunConfig, tokenizer: Tokenizer) -> CheckedDataset:
    made: Any = make_plugin(
        ref_for("dataset", config.data.source), PluginContext(seed=config.seed, tokenizer=tokenizer)
    )
    return CheckedDataset(made)


def _no_progress_bars() -> None:
    """Switch off the progress bars of transformers, which would disturb the display of the run."""
    from transformers.utils import logging

    logging.disable_progress_bar()
