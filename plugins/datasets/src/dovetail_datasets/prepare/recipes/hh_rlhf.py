"""`hh_rlhf`: preference pairs about helpful and harmless answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail_datasets.prepare.config import HhRlhfConfig
from dovetail_datasets.prepare.recipe import DataRecipe, UnusedRow, text_of, wrong
from dovetail_datasets.prepare.recipes.preference_turns import Turns, pair

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class HhRlhfRecipe(DataRecipe):
    """HH-RLHF: 169,352 preference pairs about helpful and harmless answers, rated by people (arXiv 2204.05862).

    `hh_rlhf:helpful-base` takes one of its four parts. The hub's split `test` becomes `validation`. The pairs are for preference
    objectives and reward models, not for supervised fine-tuning, since answers may be harmful.
    """

    name = "hh_rlhf"
    api = ">=1.0,<2"
    aliases = ("Anthropic/hh-rlhf",)
    Config = HhRlhfConfig
    repository = "Anthropic/hh-rlhf"
    licence = "MIT"
    train_files = "{subset}/train.jsonl.gz"
    validation_files = "{subset}/test.jsonl.gz"
    rows_are = "preferences"
    argument = "subset"
    changes = (
        "Texts are divided into messages at `Human:` and `Assistant:` behind an empty line.",
        "The prompt is what precedes the last turn of both conversations; pairs that differ before it are left out.",
        "Pairs with equal answers, an empty turn, or turns that do not alternate are left out.",
    )

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | UnusedRow:
        return pair(*(_turns(row, side, where) for side in ("chosen", "rejected")))


def _turns(row: Mapping[str, Any], column: str, where: str) -> Turns:
    before, *parts = _TURN.split(text_of(row, column, where))
    if before.strip() or not parts:
        raise wrong(where, column, row[column], "a text that begins with '\\n\\nHuman:'")
    return [
        {"role": _ROLES[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
