"""Whether an answer equals an accepted one, decided the cheap way first: as numbers and texts in one notation, then by math-verify."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards.config_functions import VerifiedSection
from dovetail_rewards.functions.answers import complaint
from dovetail_rewards.functions.latex_text import LONGEST, readable, same_text, stated
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
        """Return whether the answer equals one of the truths. An answer of over 1,000 characters is compared as text alone.

        Raises:
            TimeoutError: the symbolic comparison of the ground truth alone exceeds its limit.
            RewardError: it failed on the ground truth alone.
        """
        answer = readable(answer)
        open_ones: dict[str, list[str]] = {}
        for truth in map(readable, truths):
            pair = stated(answer, truth)
            same = pair is not None and same_text(*pair)
            if same:
                return True
            if pair is not None and same is None:
                open_ones.setdefault(pair[0], []).append(pair[1])
        if self._processes is None or len(answer) > LONGEST:
            return False
        return any(
            self._processes.equal(other, one, limit=self._limit) for one, other in open_ones.items()
        )
