"""`geometry3k`: geometry problems, each with a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_datasets.prepare.recipe import DataRecipe, text_of, value_of, wrong

_ASKED = r"Think first, within <think> and </think>; then give the final answer within \boxed{}."


class Geometry3kRecipe(DataRecipe):
    """Geometry3K: 3,002 geometry problems with figures, for vision-language models (arXiv 2105.04165)."""

    name = "geometry3k"
    api = ">=1.0,<2"
    aliases = ("hiyouga/geometry3k",)
    repository = "hiyouga/geometry3k"
    licence = "MIT"
    train_files = "data/train-*"
    validation_files = "data/validation-*"
    test_files = "data/test-*"
    scored_by = "geometry3k"
    model = "Qwen/Qwen2.5-VL-3B-Instruct"
    changes = (
        f"The prompt is the problem, whose `<image>` stands for the figure, and `{_ASKED}`.",
        "`response` is the answer in that form, without a thought: the dataset has no solutions.",
    )

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        problem, answer = text_of(row, "problem", where), text_of(row, "answer", where)
        images = value_of(row, "images", list, where)
        if problem.count("<image>") != len(images):
            raise wrong(
                where,
                "problem",
                problem,
                f"a text with '<image>' {len(images)} time(s), once for each image",
            )
        return {
            "prompt": [{"role": "user", "content": f"{problem}\n\n{_ASKED}"}],
            "images": images,
            "response": f"<think></think>\\boxed{{{answer}}}",
            "data_source": self.repository,
            "reward_model": {"style": "rule", "ground_truth": answer},
        }
