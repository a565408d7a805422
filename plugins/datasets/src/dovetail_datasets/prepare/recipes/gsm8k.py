"""`gsm8k`: word problems of grade-school mathematics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail_datasets.prepare.recipe import DataRecipe, text_of, wrong

_CALCULATION = re.compile(r"<<[^<>]*>>")
"""Notes for a calculator within solutions: `48/2 = <<48/2=24>>24`."""
_ASKED = "Reason step by step, and end with the final number after ####."


class Gsm8kRecipe(DataRecipe):
    """GSM8K: 8,792 word problems of grade-school mathematics (arXiv 2110.14168).

    The hub's split `test` becomes `validation`.
    """

    name = "gsm8k"
    api = ">=1.0,<2"
    aliases = ("openai/gsm8k",)
    repository = "openai/gsm8k"
    licence = "MIT"
    train_files = "main/train-*"
    validation_files = "main/test-*"
    scored_by = "gsm8k"
    changes = (
        f"The prompt is the question and `{_ASKED}`.",
        "The ground truth is what follows `####`, without commas.",
        "`response` is the solution, without notes for a calculator such as `<<48/2=24>>`.",
    )

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        question, solution = text_of(row, "question", where), text_of(row, "answer", where)
        _, mark, answer = solution.rpartition("####")
        if not mark or not answer.strip():
            raise wrong(where, "answer", solution, "a solution that ends with '####' and a number")
        return {
            "prompt": [{"role": "user", "content": f"{question}\n\n{_ASKED}"}],
            "response": _CALCULATION.sub("", solution),
            "data_source": self.repository,
            "reward_model": {"style": "rule", "ground_truth": answer.strip().replace(",", "")},
        }
