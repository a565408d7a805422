"""The data of a run, which the experience source reads; the loader over the data; and the plan with the numbers of rows and steps."""

from __future__ import annotations

from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.interfaces.data import Sampler
from dovetail.interfaces.source_data import SourceData
from dovetail.planning.plan import Plan, make_plan
from dovetail.planning.resolved_plugins import source_facts
from dovetail.run.data_checks import check_sampler
from dovetail.sections import RunConfig


def load_data(config: RunConfig) -> SourceData:
    """Read the tokenizer and every row with the run's experience source, the plugin that provides the samples of each step.

    Raises:
        DataError, ModelError: a file, row or tokenizer is missing or wrong; the error names it.
        ConfigError: no training files are named, or the chat template does not use an argument of `data.chat_template_args`.
    """
    facts = source_facts(config)
    source = facts.plugins["source"]
    tokenizer = source.cls.read_tokenizer(source.config, facts)
    data: SourceData = source.cls.load(source.config, facts, tokenizer)
    return data


def make_loader(
    config: RunConfig, data: SourceData, sampler: Sampler
) -> tuple[PromptLoader, Ledger]:
    """Return the loader of the training data, and the ledger that records whether each prompt from the loader was used or dropped.

    Raises:
        PluginBrokenError: the sampler gives no permutation, or two different ones for the same epoch.
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


def plan_from_data(config: RunConfig, data: SourceData) -> Plan:
    """Return the plan with the counts that need the data, such as the number of steps."""
    return make_plan(
        config, prompts=len(data.train.prompts), images=data.has_images, left_out=data.left_out
    )
