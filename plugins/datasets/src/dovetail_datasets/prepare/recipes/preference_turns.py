"""Converts two conversations that differ in their last turn to a preference pair."""

from __future__ import annotations

from typing import Any

from dovetail_datasets.prepare.recipe import UnusedRow

Turns = list[dict[str, str]]


def pair(chosen: Turns, rejected: Turns) -> dict[str, Any] | UnusedRow:
    """Return `prompt`, `chosen` and `rejected`, each as messages, or the reason why two conversations are not a pair.

    Args:
        chosen: messages with `role` and `content`, from the first turn to the answer.
        rejected: the other conversation's messages, likewise.
    """
    (*asked, answer), (*other, worse) = chosen, rejected
    if asked != other:
        return UnusedRow("the two conversations differ before their last turn")
    if not asked or any(not turn["content"].strip() for turn in (*asked, answer, worse)):
        return UnusedRow("a turn is empty")
    roles = [turn["role"] for turn in (*asked, answer) if turn["role"] != "system"]
    alternating = [("user", "assistant")[i % 2] for i in range(len(roles))]
    if roles != alternating or roles[-1] != "assistant" or worse["role"] != "assistant":
        return UnusedRow("its turns do not alternate between user and assistant")
    if answer == worse:
        return UnusedRow("the two answers are equal")
    return {"prompt": asked, "chosen": [answer], "rejected": [worse]}
