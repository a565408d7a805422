"""Config class of the environment `reasoning_gym`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.sections import VERBATIM
from dovetail_environments import EnvironmentSection

_INSTRUCTION = "Give the final answer between <answer> and </answer>."


def _has_datasets(
    _section: object, _attribute: object, datasets: Mapping[str, Mapping[str, Any]]
) -> None:
    if not datasets:
        raise ValueError(
            "the setting `datasets` is empty; expected names of reasoning-gym's datasets, such as {chain_sum: {}}"
        )


@attrs.frozen(kw_only=True)
class ReasoningGymConfig(EnvironmentSection):
    """Settings of `reasoning_gym`, which asks the policy questions from reasoning-gym's datasets."""

    datasets: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, validator=_has_datasets)
    """Names of reasoning-gym's datasets with their settings: `{chain_sum: {max_terms: 3}, coin_flip: {}}`. Tasks are divided evenly among
    the datasets.
    """
    instruction: str = attrs.field(default=_INSTRUCTION, metadata={VERBATIM: True})
    """Text after each question. If the text mentions the tag <answer>, the answer is the content of the response's last <answer> tag; else
    the answer is the whole response.
    """
