"""Parses a judge's answer: returns the verdict as a number, or the reason why there is none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rollouts import finite_float

LONGEST = 20_000
"""The number of characters at the end of an answer that are searched for a verdict."""


class NoVerdict(ValueError):
    """A judge's answer has no valid verdict; the message says why."""


class Verdicts:
    """Extracts verdicts from a judge's answers, and combines them into one score."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern)
        self._labels = {label.strip().casefold(): worth for label, worth in config.labels.items()}

    def of(self, answer: str) -> float:
        """Return the verdict in an answer: finite, within `low` … `high`, and scaled to 0 … 1 if configured.

        Raises:
            NoVerdict: the answer has no valid verdict.
        """
        config, text = self._config, answer[-LONGEST:]
        found = self._in_json(text) if config.parse == "json" else self._by_pattern(text)
        verdict = self._number(found)
        below = config.low is not None and verdict < config.low
        if below or (config.high is not None and verdict > config.high):
            bounds = f"{_bound(config.low)} … {_bound(config.high)}"
            raise NoVerdict(f"the verdict {verdict:g} is outside the bounds {bounds}")
        if config.normalise and config.low is not None and config.high is not None:
            verdict = (verdict - config.low) / (config.high - config.low)
        return verdict

    def together(self, verdicts: Sequence[float]) -> float:
        """Combine one or more verdicts into a score by the rule `aggregate`."""
        if self._config.aggregate == "median":
            return float(median(verdicts))
        if self._config.aggregate == "majority":
            counts = Counter(verdicts)
            most = max(counts.values())
            return min(verdict for verdict, count in counts.items() if count == most)
        return fmean(verdicts)

    def _by_pattern(self, text: str) -> Any:
        match = None
        for match in self._pattern.finditer(text):  # noqa: B007 - the last one counts
            pass
        if match is None:
            raise NoVerdict(f"nothing in the answer matches the pattern {self._config.pattern!r}")
        groups = match.groupdict()
        if "score" in groups:
            return groups["score"]
        return match[1] if match.re.groups else match[0]

    def _in_json(self, text: str) -> Any:
        key = self._config.field
        for start in reversed([at for at, character in enumerate(text) if character == "{"]):
            try:
                value, _ = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and key in value:
                return value[key]
        raise NoVerdict(f"the answer has no JSON object with the key {key!r}")

    def _number(self, found: Any) -> float:
        if self._labels:
            worth = self._labels.get(str(found).strip().casefold())
            if worth is None:
                known = ", ".join(self._config.labels)
                raise NoVerdict(
                    f"the verdict {str(found)[:80]!r} is unknown; expected one of: {known}"
                )
            found = worth
        if isinstance(found, str):
            try:
                found = float(found)
            except ValueError:
                found = found[:80]
        number = None if isinstance(found, bool) else finite_float(found)
        if number is None:
            raise NoVerdict(f"the verdict {found!r} is not a finite number")
        return number


def _bound(bound: float | None) -> str:
    return "any" if bound is None else f"{bound:g}"
