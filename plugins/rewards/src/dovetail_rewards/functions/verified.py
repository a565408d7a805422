"""Whether an answer equals an accepted one, decided the cheap way first: by its text, as whole numbers, then by math-verify."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards.config_functions import VerifiedSection
from dovetail_rewards.functions.answers import complaint
from dovetail_rewards.functions.latex_text import (
    LONGEST,
    as_number,
    normal_answer,
    same_text,
    unambiguous,
)
from dovetail_rewards.functions.math_processes import shared_processes


class VerifiedFunction(RewardFunction):
    """A reward function that compares answers so. Its config extends `VerifiedSection`."""

    capabilities = frozenset({"deterministic"})
    pure = True

    def __init__(self, config: VerifiedSection, context: PluginContext) -> None:
        super().__init__(config, context)
        self._verifier = Verifier(config)

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        return complaint(ground_truth)


class Verifier:
    """Compares answers as a config says; safe in threads.

    Raises:
        PluginNeedsError: symbolic comparison is asked for, and math-verify is not installed.
    """

    def __init__(self, config: VerifiedSection) -> None:
        self._limit = config.verify_timeout
        self._processes = (
            shared_processes(config.processes) if config.verify == "symbolic" else None
        )

    def right(self, answer: str, truths: Sequence[str]) -> bool:
        """Whether the answer equals one of the truths. An answer of over 1,000 characters is compared as text alone.

        Raises:
            TimeoutError: the symbolic comparison exceeded its limit, and not because of the answer alone (`MathProcesses`).
            RewardError: it failed.
        """
        answer, *truths = (unambiguous(text) for text in (answer, *truths))
        if any(same_text(answer, truth) for truth in truths):
            return True
        if self._processes is None or len(answer) > LONGEST:
            return False
        open_ones = [truth for truth in truths if not _other_whole_number(answer, truth)]
        return bool(open_ones) and self._processes.equal(open_ones, answer, limit=self._limit)


def _other_whole_number(answer: str, truth: str) -> bool:
    """Both are whole numbers, which were found unequal; a percent sign leaves it open, since 100% may mean 1."""
    if "%" in answer or "%" in truth:
        return False
    numbers = [as_number(normal_answer(text)) for text in (answer, truth)]
    return all(number is not None and number.denominator == 1 for number in numbers)
