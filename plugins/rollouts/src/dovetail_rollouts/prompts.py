"""Prompts of a run, with the functions of its agent loop."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.data.loading import configured_dataset, media_dir
from dovetail.data.prompts import PromptSet, load_prompts
from dovetail.interfaces.data import DatasetSource
from dovetail.interfaces.plugin import Tokenizer
from dovetail.rollouts.agent_loops import chat_tools
from dovetail.sections import RunConfig


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
    return load_prompts(
        source or configured_dataset(config, tokenizer),
        paths,
        tokenizer,
        config.data,
        config.model,
        media_dir=media_dir(config),
        tools=chat_tools(config, tokenizer),
    )
