"""Mixtures: combines several datasets, each with a share of every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import attrs

from dovetail.interfaces import DatasetShape, Prompt
from dovetail.sections import DataSection
from dovetail_datasets.limits import Truncation
from dovetail_datasets.prompts import PromptSet


def mixed(sets: Mapping[str, PromptSet], section: DataSection) -> PromptSet:
    """Return the prompts of all datasets, one after the other, each with its dataset's name.

    Args:
        sets: prompts by the name of their dataset.
        section: the data section, with the weights.
    """
    prompts: list[Prompt] = []
    first = 0
    for name, each in sets.items():
        # Rows are numbered over all datasets, so that each number is unique; those of the first dataset keep their numbers.
        prompts += [
            attrs.evolve(prompt, dataset=name, index=first + prompt.index)
            for prompt in each.prompts
        ]
        first += 1 + max((prompt.index for prompt in each.prompts), default=-1)
    return PromptSet(
        prompts=tuple(prompts),
        filtered_overlong=sum(each.filtered_overlong for each in sets.values()),
        truncated=sum((each.truncated for each in sets.values()), Truncation()),
        spelled=sum(each.spelled for each in sets.values()),
        bad=tuple(row for each in sets.values() for row in each.bad),
        left_out=tuple(f"{name}: {what}" for name, each in sets.items() for what in each.left_out),
        datasets=tuple(
            DatasetShape(name=name, size=len(each), weight=section.mixture[name].weight)
            for name, each in sets.items()
        ),
    )


def share_metrics(
    counted: Iterable[tuple[Prompt, int]], names: Collection[str]
) -> dict[str, float]:
    """Return each dataset's share of a step's prompts and tokens: `data/<name>/prompt_share`, `data/<name>/token_share`.

    Args:
        counted: prompts or examples, each with its number of tokens.
        names: the names of all datasets.
    """
    prompts, tokens = Counter[str](), Counter[str]()
    for prompt, count in counted:
        prompts[prompt.dataset] += 1
        tokens[prompt.dataset] += count
    shares = {"prompt_share": prompts, "token_share": tokens}
    return {
        f"data/{name}/{what}": counts[name] / max(counts.total(), 1)
        for name in names
        for what, counts in shares.items()
    }
