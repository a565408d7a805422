"""The reward functions `length_penalty` and `repetition_penalty`, which shape a reward and need no ground truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import RewardError
from dovetail.interfaces import GroundTruth, RewardFunction
from dovetail_rewards_extra.config import LengthPenaltyConfig, RepetitionPenaltyConfig


class LengthPenalty(RewardFunction):
    """A penalty that grows linearly with the excess or deficit of a response's length.

    Let x be the length, L the limit, B the buffer, M the minimum and p the penalty. The score is −p·(M − x) / M below the minimum, else
    −p·clip((x − (L − B)) / B, 0, 1): the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13). For B = 0, the penalty is
    p at L and above.

    In a config:

        reward: {function: {limit: 200, buffer: 50}}
    """

    name = "length_penalty"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = LengthPenaltyConfig

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
        response_ids: Sequence[int] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score` in [−penalty, 0], and its part `length` in the configured unit.

        Raises:
            RewardError: the unit is tokens, and the response's tokens are unknown.
        """
        config: LengthPenaltyConfig = self.config
        text = solution_str.strip()
        if config.unit == "tokens":
            if response_ids is None:
                raise RewardError(
                    "length_penalty can't count the response's tokens (unit=tokens): the response has no response_ids",
                    hint="set unit=words or unit=characters",
                )
            length = len(response_ids)
        else:
            length = len(text.split()) if config.unit == "words" else len(text)
        start = config.limit - config.buffer
        if length < config.minimum:
            share = (config.minimum - length) / config.minimum
        elif length >= config.limit:
            share = 1.0
        else:
            share = max(0.0, length - start) / config.buffer if config.buffer else 0.0
        return {"score": -config.penalty * share + 0.0, "length": float(length)}


class RepetitionPenalty(RewardFunction):
    """A penalty on n-grams, of words or of characters, that repeat an earlier n-gram of the same response.

    With k n-grams, u of them different, and f = `free`, the repeated share is r = 1 − u / k and the score is −penalty·max(0, r − f) / (1 −
    f). With fewer than two n-grams, the score is 0. A similar n-gram repetition penalty is in arXiv:2502.03373.
    """

    name = "repetition_penalty"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = RepetitionPenaltyConfig

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score` in [−penalty, 0], and its part `repeated`: the share of n-grams that are repetitions."""
        config: RepetitionPenaltyConfig = self.config
        text = solution_str.casefold()
        pieces = text.split() if config.unit == "words" else list("".join(text.split()))
        count = len(pieces) - config.n + 1
        if count < 2:
            return {"score": 0.0, "repeated": 0.0}
        runs = set(zip(*(pieces[i : count + i] for i in range(config.n)), strict=True))
        repeated = 1 - len(runs) / count
        share = max(0.0, repeated - config.free) / (1 - config.free)
        return {"score": -config.penalty * share + 0.0, "repeated": repeated}
