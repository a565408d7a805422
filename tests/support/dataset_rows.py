"""Rows and conversations, sources that give them, and what is read of them, for the tests of data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.interfaces import DatasetSource, PluginContext, Sampler
from dovetail.sections import PluginSection
from dovetail_datasets.config import FilesConfig
from dovetail_datasets.files import FilesSource
from dovetail_datasets.samplers import SequentialSampler


def turns(*texts: Any, first: str = "user", **last: Any) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn; the last one has these fields besides."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    messages[-1] |= last
    return messages


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


class InMemory(DatasetSource):
    """Gives the rows that it is made with."""

    name = "given"

    def __init__(self, rows: Any) -> None:
        super().__init__(FilesConfig(), PluginContext())
        self._rows = rows

    def read(self, paths: Any) -> Any:
        return self._rows


def files_source() -> FilesSource:
    """The source of files, with its defaults."""
    return FilesSource(FilesConfig(), PluginContext())


def trained(tokenizer: Any, answer: Any) -> list[str]:
    """The texts of an answer that are trained on, one for each run of its mask."""
    masked = np.ma.masked_array(answer.ids, ~answer.mask)
    return [tokenizer.decode(answer.ids[run].tolist()) for run in np.ma.clump_unmasked(masked)]


def content(prompts: Iterable[Any]) -> list[Any]:
    """Everything of examples that a run depends on."""
    return [
        (
            p.index,
            p.where,
            p.dataset,
            p.raw,
            p.prompt_ids.tolist(),
            [(a.ids.tolist(), a.mask.tolist()) for a in p.answers],
            dict(p.labels),
        )
        for p in prompts
    ]


def sequential() -> Sampler:
    """The sampler that keeps the order of rows."""
    return SequentialSampler(PluginSection(), PluginContext())


def loader(
    train: Any, batch: int, window: int = 2048, sampler: Sampler | None = None
) -> tuple[PromptLoader, Ledger]:
    """A loader over what `load_data` has read for training, and its ledger."""
    ledger = Ledger()
    made = PromptLoader(
        train.prompts,
        sampler or sequential(),
        batch,
        ledger,
        datasets=train.datasets,
        window=window,
    )
    return made, ledger


def learn(ledger: Ledger, batch: Iterable[Any], step: int = 1) -> None:
    """Account for a batch that a step has taken and used."""
    for prompt in batch:
        ledger.take(*prompt.key, step=step)
        ledger.use(*prompt.key)
    ledger.check()
