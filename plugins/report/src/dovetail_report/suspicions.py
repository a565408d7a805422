"""Samples that may be rewarded for something other than the task, which a person should read first."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import quantiles
from typing import Any

from dovetail.telemetry import numbers
from dovetail_report.text import as_text

_RIGHT = re.compile(r"(?:.*/)?(?:acc|accuracy|correct|is_correct)")
"""Names of components that say whether an answer is right."""
_LEAST_CHARACTERS = 20
"""Minimum length of an answer that is suspicious if several prompts have the same answer; short answers such as yes and no may recur."""
_LEAST_WORDS = 30
_SAME_CALLS = 3


def suspicions(
    rows: Sequence[Mapping[str, Any]], right: float | None = None
) -> tuple[list[list[str]], float | None]:
    """Return the suspicious features of each sample, and the lowest score of a right answer.

    Samples that score below the step's mean get no features. The lowest score of a right answer is None if no answer has been
    right so far.

    Args:
        rows: the rows of `samples/step_N.jsonl` of one step.
        right: the lowest score of a right answer in earlier steps, used if this step has no right answer; None if there was none.
    """
    scores = [row["score"] if numbers.is_number(row.get("score")) else None for row in rows]
    known = [score for score in scores if score is not None]
    if not known:
        return [[] for _ in rows], right
    step = _Step(rows, scores, right)
    mean, least = sum(known) / len(known), min(0.0, *known)
    found = [
        [] if score is None or score < mean or score <= least else [*step.signs(row, score)]
        for row, score in zip(rows, scores, strict=True)
    ]
    return found, step.least_right


class _Step:
    """The answers, scores and lengths of a step's samples, with which each sample is compared.

    Attributes:
        least_right: the lowest score of a right answer; None if no answer has been right so far.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        scores: Sequence[float | None],
        right: float | None,
    ) -> None:
        self._prompts: defaultdict[str, set[str]] = defaultdict(set)
        for row in rows:
            self._prompts[as_text(row.get("response"))].add(as_text(row.get("prompt")))
        known = [score for score in scores if score is not None]
        self._quarters = quantiles(known, n=4) if len(known) > 3 else [known[0]] * 3
        pairs = zip(rows, scores, strict=True)
        paid = [score for row, score in pairs if score is not None and _right(row) == 1]
        self.least_right = min(paid, default=right)
        lengths = sorted(n for row in rows if numbers.is_number(n := row.get("response_length")))
        self._length = lengths[len(lengths) // 2] if lengths else 0

    def signs(self, row: Mapping[str, Any], score: float) -> Iterator[str]:
        """Yield the suspicious properties of a sample with a high score."""
        text, length = as_text(row.get("response")), row.get("response_length")
        low, middle, high = self._quarters
        if self.least_right is not None and _right(row) == 0 and score >= self.least_right:
            yield "is wrong, and is paid as much as a right answer"
        if len(self._prompts[text]) > 2 and len(text) >= _LEAST_CHARACTERS:
            yield f"the same answer to {len(self._prompts[text])} prompts"
        if (share := _repeated(text)) > 0.5:
            yield f"repeats itself: {share:.0%} of its runs of four words"
        if high > low and score - middle > 5 * (high - low):
            yield "its score is far from the step's others"
        if numbers.is_number(length) and self._length and length > 4 * self._length:
            yield f"{length / self._length:.1f} times as long as is usual"
        if (count := _same_calls(row)) >= _SAME_CALLS:
            yield f"makes the same call {count} times"


def _right(row: Mapping[str, Any]) -> float | None:
    """Return 1 for a right answer and 0 for a wrong one, by a component of the reward; None without such a component."""
    components = row.get("components")
    if isinstance(components, Mapping):
        for name, value in components.items():
            if _RIGHT.fullmatch(str(name)) and value in (0, 1):
                return float(value)
    return None


def _repeated(text: str) -> float:
    """Return the share of four-word sequences that repeat an earlier one in the text; 0 for a short text."""
    words = text.split()
    runs = [*zip(words, words[1:], words[2:], words[3:], strict=False)]
    return 1 - len(set(runs)) / len(runs) if len(words) >= _LEAST_WORDS else 0.0


def _same_calls(row: Mapping[str, Any]) -> int:
    """Return how many times an episode makes its most frequent tool call with the same arguments; 0 without calls."""
    trajectory = row.get("trajectory")
    turns = trajectory.get("turns") if isinstance(trajectory, Mapping) else None
    calls = [
        json.dumps(call.get("function"), sort_keys=True)
        for turn in (turns if isinstance(turns, list) else ())
        if isinstance(turn, Mapping)
        for call in turn.get("calls") or ()
        if isinstance(call, Mapping)
    ]
    return max(Counter(calls).values(), default=0)
