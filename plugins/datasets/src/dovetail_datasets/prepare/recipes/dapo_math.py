"""`dapo_math`: the training set of DAPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_datasets.prepare.recipe import DataRecipe, messages_of, text_of, value_of


class DapoMathRecipe(DataRecipe):
    """DAPO-Math-17k: problems with integer answers, which DAPO was trained on (arXiv 2503.14476).

    The file has each problem about a hundred times; only the first copy is kept. A share of the problems is held out.
    """

    name = "dapo_math"
    api = ">=1.0,<2"
    aliases = ("BytedTsinghua-SIA/DAPO-Math-17k",)
    repository = "BytedTsinghua-SIA/DAPO-Math-17k"
    licence = "Apache-2.0"
    train_files = "data/dapo-math-17k.parquet"
    scored_by = "dapo_math"
    distinct = True
    changes = (
        "Of rows with the same prompt the first is kept.",
        "`response` is `Answer: ` and the ground truth: the dataset has no solutions.",
        "`extra_info.index`, the dataset's own name of the problem, becomes `extra_info.id`.",
    )

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        judged = value_of(row, "reward_model", dict, where)
        truth = text_of(judged, "ground_truth", f"{where}, 'reward_model'")
        extra = value_of(row, "extra_info", dict, where)
        return {
            "prompt": messages_of(row, "prompt", where),
            "response": f"Answer: {truth}",
            "data_source": text_of(row, "data_source", where),
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"id": text_of(extra, "index", f"{where}, 'extra_info'")},
        }
