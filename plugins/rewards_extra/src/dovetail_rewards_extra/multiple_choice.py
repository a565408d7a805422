"""The reward function `multiple_choice`: compares the letter that a response chooses with the right letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards import last_boxed, last_match, last_tag
from dovetail_rewards_extra.config import MultipleChoiceConfig

_STATEMENT = r"\b[Aa]nswer\b[*_\s]{0,4}(?:is|[:：=])[*_]{0,3}[:：]?\s{0,4}(?:the\s)?(?:(?:[Oo]ption|[Cc]hoice)\s)?"
_WRITTEN = r"[*_$\[]{0,3}(?:\\(?:text|mathrm|mathbf|textbf)\{)?"


class MultipleChoice(RewardFunction):
    r"""Compares the letter that a response chooses with the ground truth. The places in `extract` are searched in order for a letter.

    Read as B: `\boxed{B}`, `\boxed{\text{(B)}}`, `<answer>B) Paris</answer>`, `the answer is (B)`, `Answer: **B**`, `(B)` alone
    on the last line. The words A and I do not count as letters: `the answer is A dog` chooses no letter. The ground truth is a letter, also
    as `b`, `(B)` or `B.`, or a list of letters. The right letter scores `score`, another letter `format_score`, no letter `miss_score`.
    """

    name = "multiple_choice"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = MultipleChoiceConfig

    def __init__(self, config: MultipleChoiceConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        letter = _letter(config.choices)
        self._written = re.compile(_WRITTEN + letter)
        self._statement = re.compile(_STATEMENT + _WRITTEN + letter)
        self._alone = re.compile(rf"[^\w\s]{{0,8}}([{config.choices}])[^\w\s]{{0,8}}")
        self._anywhere = re.compile(letter)
        self._finders: dict[str, Callable[[str], str | None]] = {
            "boxed": lambda text: self._inside(last_boxed(text)),
            "tag": lambda text: self._inside(last_tag(text, "answer")),
            "statement": lambda text: _chosen(last_match(self._statement, text)),
            "line": self._line,
            "last": lambda text: _chosen(last_match(self._anywhere, text)),
        }

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, its parts `format` (a letter is chosen) and `correct`, each 0 or 1, and `pred`: the letter, or None."""
        found = (self._finders[place](solution_str) for place in self.config.extract)
        pred = next((letter for letter in found if letter), None)
        right = pred is not None and pred in _truths(ground_truth, self.config.choices)
        wrong = self.config.miss_score if pred is None else self.config.format_score
        return {
            "score": self.config.score if right else wrong,
            "format": float(pred is not None),
            "correct": float(right),
            "pred": pred,
        }

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        if not _truths(ground_truth, config.choices):
            return f"ground truth {ground_truth!r:.80} is not a choice; expected one of the letters {config.choices}"
        return None

    def _inside(self, text: str | None) -> str | None:
        """Return the letter with which the content of a box or tag begins."""
        match = self._written.match(text) if text else None
        return _chosen(match)

    def _line(self, text: str) -> str | None:
        line = text.rstrip()
        match = self._alone.fullmatch(line[line.rfind("\n") + 1 :].strip())
        return match.group(1) if match else None


def _letter(choices: str) -> str:
    """Return the regular expression for one of the letters `choices` that stands alone or in brackets.

    Before a lower-case word, A and I do not match, since they are words there.
    """
    alone = rf"(?<![\w'’\\])([{choices}])(?![\w'’+/^=-]|(?<=[AI])\s[a-z])"
    return rf"(?:\(\s?([{choices}])\s?\)|{alone})"


def _chosen(match: re.Match[str] | None) -> str | None:
    return (match.group(1) or match.group(2)) if match else None


def _truths(ground_truth: GroundTruth, choices: str) -> set[str]:
    """Return the right letters; empty if there are none, or if one is not among the choices."""
    several = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    letters = [str(truth).strip().strip("().:[]").strip().upper() for truth in several]
    return set(letters) if all(len(one) == 1 and one in choices for one in letters) else set()
