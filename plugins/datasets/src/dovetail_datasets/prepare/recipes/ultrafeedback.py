"""`ultrafeedback`: preference pairs that a model rated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_datasets.prepare.config import PairsConfig
from dovetail_datasets.prepare.recipe import DataRecipe, UnusedRow, messages_of, value_of
from dovetail_datasets.prepare.recipes.preference_turns import pair


class UltraFeedbackRecipe(DataRecipe):
    """UltraFeedback, binarized: 63,135 preference pairs that GPT-4 rated (arXiv 2310.01377, 2310.16944).

    Uses the hub's splits `train_prefs` and `test_prefs`.
    """

    name = "ultrafeedback"
    api = ">=1.0,<2"
    aliases = ("HuggingFaceH4/ultrafeedback_binarized",)
    Config = PairsConfig
    repository = "HuggingFaceH4/ultrafeedback_binarized"
    licence = "MIT"
    train_files = "data/train_prefs-*"
    validation_files = "data/test_prefs-*"
    rows_are = "preferences"
    changes = (
        "The prompt is what precedes the last turn of both conversations; pairs that differ before it are left out.",
        "Pairs with equal answers or an empty turn are left out.",
        "`margin` is the score of the chosen answer less that of the rejected one.",
    )

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | UnusedRow:
        made = pair(*(messages_of(row, side, where) for side in ("chosen", "rejected")))
        better, worse = (value_of(row, f"score_{s}", float, where) for s in ("chosen", "rejected"))
        return made if isinstance(made, UnusedRow) else {**made, "margin": better - worse}
