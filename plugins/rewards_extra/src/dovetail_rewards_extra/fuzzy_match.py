"""The reward function `fuzzy_match`: the similarity of the response to the ground truth, from 0 to 1."""

from __future__ import annotations

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.errors import PluginNeedsError
from dovetail.interfaces import GroundTruth, PluginConfig, PluginContext, RewardFunction
from dovetail_rewards import accepted_texts, complaint, extracted
from dovetail_rewards_extra.config import FuzzyMatchConfig

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class FuzzyMatch(RewardFunction):
    """Scores the similarity of the response to the most similar accepted answer.

    token_f1 (SQuAD, arXiv:1606.05250): F1 = 2c / (p + t), with p words in the response, t in the ground truth, and c in common, counting
    repetitions. edit: 1 − d / max(p, t), where d is the Levenshtein distance and p and t are lengths, in characters (package rapidfuzz).
    With `threshold`, the similarity becomes 1 or 0.
    """

    name = "fuzzy_match"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = FuzzyMatchConfig

    def __init__(self, config: FuzzyMatchConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._extract = re.compile(config.extract, re.DOTALL) if config.extract else None
        self._likeness = _edit_likeness() if config.metric == "edit" else token_f1

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, the component `similarity` in [0, 1], and `pred`: the compared text in its normalised form, or None."""
        answer = extracted(self._extract, solution_str)
        if answer is None:
            return {"score": 0.0, "similarity": 0.0, "pred": None}
        pred = self._normal(answer)
        truths = [self._normal(truth) for truth in accepted_texts(ground_truth)]
        likeness = max((self._likeness(pred, truth) for truth in truths), default=0.0)
        limit = self.config.threshold
        result = likeness if limit is None else float(likeness >= limit)
        return {"score": self.config.score * result, "similarity": likeness, "pred": pred}

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        return complaint(ground_truth)

    def _normal(self, text: str) -> str:
        if not self.config.normalise:
            return text.strip()
        return " ".join(_ARTICLES.sub(" ", text.casefold().translate(_NO_PUNCTUATION)).split())


def token_f1(answer: str, truth: str) -> float:
    """Return the F1 score of two texts as bags of words; 1 if both are empty, 0 if only one is empty."""
    words, wanted = answer.split(), truth.split()
    if not words or not wanted:
        return float(words == wanted)
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


def _edit_likeness() -> Callable[[str, str], float]:
    if importlib.util.find_spec("rapidfuzz") is None:
        raise PluginNeedsError(
            "reward function 'fuzzy_match' with metric=edit needs the package rapidfuzz, which is not installed",
            hint="pip install 'dovetail-rewards-extra[fuzzy]', or set metric=token_f1",
        )
    from rapidfuzz.distance import Levenshtein

    return lambda answer, truth: float(Levenshtein.normalized_similarity(answer, truth))
