"""Compares an answer with accepted answers: first as numbers and as texts in normal form, which is cheap, then by math-verify."""

from __future__ import annotations

from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards.config import VerifiedSection
from dovetail_rewards.functions.answers import accepted_texts, complaint, last_boxed
from dovetail_rewards.functions.latex_text import LONGEST, readable, same_text, stated
from dovetail_rewards.functions.math_processes import shared_processes


class VerifiedFunction(RewardFunction):
    """Base of reward functions that compare a mathematical answer with accepted answers; their configs extend `VerifiedSection`.

    Raises:
        PluginNeedsError: symbolic comparison is configured, and math-verify is not installed.
    """

    capabilities = frozenset({"deterministic"})
    pure = True

    def __init__(self, config: VerifiedSection, context: PluginContext) -> None:
        super().__init__(config, context)
        symbolic = config.verify == "symbolic"
        self._processes = shared_processes(config.processes) if symbolic else None

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        return complaint(ground_truth)

    def is_right(self, answer: str | None, ground_truth: GroundTruth) -> bool:
        r"""Return whether the answer, boxed or not, equals an accepted answer; safe in threads.

        An answer of over 1,000 characters is compared only as text. An answer on which math-verify fails or exceeds `verify_timeout` is
        wrong, unless math-verify can't compare the ground truth even with the number 1.

        Raises:
            TimeoutError: comparing the ground truth with the number 1 takes longer than `verify_timeout`.
            RewardError: math-verify can't compare the ground truth with the number 1, or its process died.
        """
        if not answer:
            return False
        answer = readable(answer)
        open_ones: dict[str, list[str]] = {}
        for text in accepted_texts(ground_truth):
            pair = stated(answer, readable(last_boxed(text) or text))
            same = pair is not None and same_text(*pair)
            if same:
                return True
            if pair is not None and same is None:
                open_ones.setdefault(pair[0], []).append(pair[1])
        if self._processes is None or len(answer) > LONGEST:
            return False
        limit = self.config.verify_timeout
        return any(
            self._processes.equal(truths, one, limit=limit) for one, truths in open_ones.items()
        )
