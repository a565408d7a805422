"""The data of a run: read by its source, the loader over it, and the plan with its counts."""

from __future__ import annotations

from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.data.loading import Data
from dovetail.errors import ConfigError
from dovetail.interfaces.data import Sampler
from dovetail.interfaces.plugin import Tokenizer
from dovetail.planning.plan import Plan, make_plan
from dovetail.planning.resolved_plugins import source_facts
from dovetail.run.data_checks import check_sampler
from dovetail.sections import RunConfig


def load_data(config: RunConfig) -> Data:
    """Read the tokenizer and every row, as the run's source does.

    Raises:
        DataError, ModelError: what is missing or wrong, with file and row.
        ConfigError: no training files are named, or the chat template does not read an argument that is given.
    """
    section, facts = config.data, source_facts(config)
    if section.train_files and section.mixture:
        raise ConfigError(
            "data.train_files and data.mixture both name training files",
            hint="name all of them in data.mixture",
        )
    source = facts.plugins["source"]
    data: Data = source.cls.load(source.config, facts, read_tokenizer(config))
    return data


def read_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a config, with its chat template; for errors see `load_tokenizer`."""
    from dovetail.data.tokenizer import load_tokenizer

    _no_progress_bars()
    return load_tokenizer(config.model, chat_template_args=config.data.chat_template_args)


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


def _no_progress_bars() -> None:
    """Switch off the progress bars of transformers, which would disturb the display of the run."""
    from transformers.utils import logging

    logging.disable_progress_bar()
