"""`math`: problems of mathematics competitions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail_datasets.prepare.recipe import DataRecipe, UnusedRow, text_of

_ASKED = r"Reason step by step, and put the final answer within \boxed{}."
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{$.,]+)")


class MathRecipe(DataRecipe):
    """MATH: 12,500 competition problems with worked solutions (arXiv 2103.03874).

    The hub's split `test` becomes `validation`.
    """

    name = "math"
    api = ">=1.0,<2"
    aliases = ("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH")
    repository = "DigitalLearningGmbH/MATH-lighteval"
    licence = "MIT"
    train_files = "data/train-*"
    validation_files = "data/test-*"
    scored_by = "math"
    changes = (
        f"The prompt is the problem and `{_ASKED}`.",
        r"The ground truth is the content of the last `\boxed{…}` of the solution; problems without one are left out.",
        "`response` is the solution.",
    )

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | UnusedRow:
        problem, solution = text_of(row, "problem", where), text_of(row, "solution", where)
        answer = last_boxed(solution)
        if not answer:
            return UnusedRow("the solution has no boxed answer")
        return {
            "prompt": [{"role": "user", "content": f"{problem}\n\n{_ASKED}"}],
            "response": solution,
            "data_source": self.repository,
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {
                "level": text_of(row, "level", where),
                "type": text_of(row, "type", where),
            },
        }


def last_boxed(text: str) -> str:
    r"""Return the content of the last `\boxed{…}`, `\fbox{…}` or `\boxed 7` of a text; empty if none is closed."""
    found = list(_BOX.finditer(text))
    if not found:
        return ""
    if found[-1][1] != "{":
        return found[-1][1]
    start = place = found[-1].end()
    depth = 1
    while depth and place < len(text):
        depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
        place += 1
    return "" if depth else text[start : place - 1].strip()
