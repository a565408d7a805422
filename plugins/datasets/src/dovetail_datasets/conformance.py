"""The suites of the recipes: rows in the form of each dataset's card, made up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from dovetail_datasets.config import ReasoningGymConfig
from dovetail_datasets.recipes.dapo_math import DapoMathRecipe
from dovetail_datasets.recipes.geometry3k import Geometry3kRecipe
from dovetail_datasets.recipes.gsm8k import Gsm8kRecipe
from dovetail_datasets.recipes.hh_rlhf import HhRlhfRecipe
from dovetail_datasets.recipes.math import MathRecipe
from dovetail_datasets.recipes.reasoning_gym import ReasoningGymRecipe
from dovetail_datasets.recipes.ultrafeedback import UltraFeedbackRecipe
from dovetail_datasets.recipes.xlam_function_calling import XlamFunctionCallingRecipe
from dovetail_datasets.testing import DataRecipeConformance, Rows
from dovetail_sdk.testing import square


class TestGsm8kRecipe(DataRecipeConformance):
    """Questions, and solutions with notes for a calculator."""

    plugin = Gsm8kRecipe
    rows = {
        "train": [
            {
                "question": f"Ann has {n} pens and buys {n}. How many has she?",
                "answer": f"She has {n}+{n} = <<{n}+{n}={2 * n}>>{2 * n} pens.\n#### {2 * n:,}",
            }
            for n in (4, 600)
        ],
        "validation": [{"question": "What is 2 plus 3?", "answer": "2+3 = <<2+3=5>>5\n#### 5"}],
    }


class TestMathRecipe(DataRecipeConformance):
    """Problems with solutions whose answer is in a box."""

    plugin = MathRecipe
    rows = {
        "train": [
            {
                "problem": "What is half of a third?",
                "level": "Level 1",
                "type": "Prealgebra",
                "solution": r"It is $\frac12\cdot\frac13=\boxed{\frac{1}{6}}$.",
            },
            {
                "problem": "What is $2^3$?",
                "level": "Level 2",
                "type": "Algebra",
                "solution": r"We have $2^3=\boxed 8$.",
            },
        ],
        "validation": [
            {
                "problem": "What is $1+1$?",
                "level": "Level 1",
                "type": "Algebra",
                "solution": r"It is $\boxed{2}$.",
            }
        ],
    }


class TestDapoMathRecipe(DataRecipeConformance):
    """Rows in verl's schema, each more than once."""

    plugin = DapoMathRecipe
    rows = {
        "train": [
            {
                "data_source": "math_dapo",
                "prompt": [
                    {
                        "content": f"Solve it, and end with a line `Answer: $Answer`.\n\nWhat is {n} + 1?",
                        "role": "user",
                    }
                ],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"problem-{n}"},
            }
            for n in (1, 2, 3, 1, 2)
        ]
    }
    unread = frozenset({"ability"})


class TestGeometry3kRecipe(DataRecipeConformance):
    """Problems with a picture each."""

    plugin = Geometry3kRecipe
    rows = {
        split: [
            {
                "images": [{"bytes": square(colour), "path": None}],
                "problem": f"<image>Find the side {name}.",
                "answer": r"2 \sqrt { 3 }",
            }
            for name, colour in zip(names, ((255, 0, 0), (0, 255, 0)), strict=True)
        ]
        for split, names in (("train", "ab"), ("validation", "cd"), ("test", "ef"))
    }  # type: ignore[assignment]  # the names of splits


class TestUltraFeedbackRecipe(DataRecipeConformance):
    """Pairs with their scores."""

    plugin = UltraFeedbackRecipe
    rows = {
        split: [
            {
                "prompt": f"Name a colour of {thing}.",
                "prompt_id": f"id of {thing}",
                "chosen": [
                    {"content": f"Name a colour of {thing}.", "role": "user"},
                    {"content": "It is green.", "role": "assistant"},
                ],
                "rejected": [
                    {"content": f"Name a colour of {thing}.", "role": "user"},
                    {"content": "No.", "role": "assistant"},
                ],
                "messages": [
                    {"content": f"Name a colour of {thing}.", "role": "user"},
                    {"content": "It is green.", "role": "assistant"},
                ],
                "score_chosen": 8.5,
                "score_rejected": 4.0,
            }
            for thing in things
        ]
        for split, things in (("train", ("grass", "leaves")), ("validation", ("moss",)))
    }  # type: ignore[assignment]  # the names of splits
    unread = frozenset({"prompt", "prompt_id", "messages"})


class TestHhRlhfRecipe(DataRecipeConformance):
    """Pairs of texts, as compressed lines of JSON."""

    plugin = HhRlhfRecipe
    rows = {
        "train": [
            {
                "chosen": f"\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: How do I {act}?\n\nAssistant: Like this:\n\nslowly.",
                "rejected": f"\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: How do I {act}?\n\nAssistant: No idea",
            }
            for act in ("swim", "sing")
        ],
        "validation": [
            {
                "chosen": "\n\nHuman: How do I cook?\n\nAssistant: Boil water.",
                "rejected": "\n\nHuman: How do I cook?\n\nAssistant: Go away.",
            }
        ],
    }

    def file_of(self, split: str) -> str:
        """Return the file of one of the four parts."""
        return f"helpful-base/{'test' if split == 'validation' else split}.jsonl.gz"

    def write(self, path: Path, rows: Rows) -> None:
        """Write lines of JSON, compressed."""
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


class TestXlamFunctionCallingRecipe(DataRecipeConformance):
    """Queries with tools and calls as JSON text, in a JSON array."""

    plugin = XlamFunctionCallingRecipe
    rows = {
        "train": [
            {
                "id": number,
                "query": f"What is the weather in {city}, and at which hours is it dry?",
                "answers": json.dumps(
                    [
                        {"name": "weather", "arguments": {"city": city}},
                        {"name": "dry_hours", "arguments": {"city": city, "days": [1, 2]}},
                    ]
                ),
                "tools": json.dumps(
                    [
                        {
                            "name": "weather",
                            "description": "The weather of a city.",
                            "parameters": {
                                "city": {"description": "Its name.", "type": "str"},
                                "unit": {"description": "Of it.", "type": "str", "default": "C"},
                            },
                        },
                        {
                            "name": "dry_hours",
                            "description": "Hours without rain.",
                            "parameters": {
                                "city": {"description": "Its name.", "type": "str"},
                                "days": {"description": "Which.", "type": "List[int], optional"},
                            },
                        },
                    ]
                ),
            }
            for number, city in enumerate(("Rome", "Oslo", "Bern"))
        ]
    }
    unread = frozenset({"id"})

    def write(self, path: Path, rows: Rows) -> None:
        """Write a JSON array."""
        path.write_text(json.dumps([*rows]), encoding="utf-8")


class TestReasoningGymRecipe(DataRecipeConformance):
    """A task that is quickly made."""

    plugin = ReasoningGymRecipe
    config = ReasoningGymConfig(
        name="reasoning_gym", task="leg_counting", size=12, validation_size=4
    )
