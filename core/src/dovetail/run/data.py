"""The data of a run: tokenizer and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.errors import ConfigError
from dovetail.interfaces.plugin import PluginContext, Tokenizer
from dovetail.interfaces.trainer import Examples
from dovetail.planning.resolved_plugins import examples_of_config
from dovetail.run.data_checks import CheckedDataset
from dovetail.sections import RunConfig

if TYPE_CHECKING:
    from dovetail.data.prompts import PromptSet
    from dovetail.interfaces.data import DatasetSource


@attrs.frozen(kw_only=True, eq=False)
class Data:
    """Tokenizer and prompts, or what the trainer takes of the dataset in their place."""

    tokenizer: Tokenizer
    train: PromptSet
    val: PromptSet | None
    kind: Examples = "prompts"
    """What they are."""

    @property
    def has_images(self) -> bool:
        """Whether a prompt has an image, to train on or held out."""
        return any(prompts is not None and prompts.has_images for prompts in (self.train, self.val))


def load_data(config: RunConfig) -> Data:
    """Read the tokenizer and every prompt.

    Raises:
        DataError, ModelError: what is missing or wrong, with file and row.
        ConfigError: no training files are named, or the chat template does not read an argument that is given.
    """
    from dovetail.data.examples import load_examples

    if not config.data.train_files:
        raise ConfigError(
            "data.train_files names no file", hint="set data.train_files=path/to/train.parquet"
        )
    kind = examples_of_config(config)
    tokenizer = read_tokenizer(config)

    def read(paths: tuple[str, ...]) -> PromptSet:
        if kind == "prompts":
            return read_prompts(config, tokenizer, paths)
        source = _source(config, tokenizer)
        return load_examples(source, paths, tokenizer, config.data, config.model, kind)

    train = read(config.data.train_files)
    val = read(config.data.val_files) if config.data.val_files else None
    return Data(tokenizer=tokenizer, train=train, val=val, kind=kind)


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
    from dovetail.data.prompts import load_prompts
    from dovetail.run.agent_loops import chat_tools

    return load_prompts(
        source or _source(config, tokenizer),
        paths,
        tokenizer,
        config.data,
        config.model,
        media_dir=Path(config.data.media_dir or Path(config.output_dir) / "media"),
        tools=chat_tools(config, tokenizer),
    )


def _source(config: RunConfig, tokenizer: Tokenizer) -> CheckedDataset:
    from dovetail.plugins.load import make_plugin, ref_for

    made: Any = make_plugin(
        ref_for("dataset", config.data.source), PluginContext(seed=config.seed, tokenizer=tokenizer)
    )
    return CheckedDataset(made)


def _no_progress_bars() -> None:
    """Switch off the progress bars of transformers, which would disturb the display of the run."""
    from transformers.utils import logging

    logging.disable_progress_bar()
