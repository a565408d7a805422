"""The kinds of example that a dataset may hold: their names and their additional columns."""

from __future__ import annotations

from dovetail.interfaces import Examples

NAMES: dict[Examples, str] = {
    "prompts": "prompts",
    "conversations": "conversations",
    "preferences": "preference pairs",
    "unpaired_preferences": "rated responses",
}
"""The plural noun for each kind of example."""
OBJECTIVES: dict[Examples, str] = {
    "conversations": "nll",
    "preferences": "dpo",
    "unpaired_preferences": "kto",
}
"""The objective that error messages suggest for each kind."""
LABELS: dict[Examples, frozenset[str]] = {
    "preferences": frozenset({"pair_id", "chosen", "margin"}),
    "unpaired_preferences": frozenset({"desirable"}),
}
"""Additional columns of each kind; `margin` only if the dataset has this column and a plugin requires it."""


def advice_on_column(column: str, kind: Examples) -> str | None:
    """Return a hint to train on another kind of example than `kind`, one that has this column; None if no other kind has it."""
    for other, labels in LABELS.items():
        if column in labels and other != kind:
            return (
                f"set trainer.name=supervised trainer.examples={other} to train on {NAMES[other]}"
            )
    return None
