"""Plugins on NumPy alone, and their suites; `test_without_torch.py` runs them where nothing heavier can be imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dovetail.batch import Batch
from dovetail.interfaces import (
    AdvantageEstimator,
    Advantages,
    Groups,
    RewardFunction,
    SampleFilter,
    Tracker,
)
from dovetail_sdk.testing.conformance import (
    AdvantageConformance,
    RewardFunctionConformance,
    SampleFilterConformance,
    TrackerConformance,
)


class AboveMean(AdvantageEstimator):
    """A_i = r_i − mean of the group; a group of one gives 0."""

    name = "above_mean"
    api = ">=1.0,<3"
    scope = "group"
    level = "sample"

    @classmethod
    def requires(cls, config: object) -> frozenset[str]:
        return frozenset({"scores"})

    def estimate(self, columns: Batch, groups: Groups) -> Advantages:
        scores_N = columns["scores"].astype(np.float64)
        return Advantages(advantages=(scores_N - groups.mean_N(scores_N)).astype(np.float32))


class AnswerInside(RewardFunction):
    """1 where the response contains the answer, else 0."""

    name = "answer_inside"
    api = ">=1.0,<4"

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: object,
        extra_info: Mapping[str, object] | None = None,
    ) -> float:
        return float(str(ground_truth) in solution_str)


class SomeTokens(SampleFilter):
    """Sample i is kept ⇔ it has a token of the policy."""

    name = "some_tokens"
    api = ">=1.0,<3"
    action = "mask"

    @classmethod
    def requires(cls, config: object) -> frozenset[str]:
        return frozenset({"response_mask"})

    def keep(self, columns: Batch, groups: Groups) -> np.ndarray:
        return np.asarray(columns["response_mask"].sum() > 0)


class Lines(Tracker):
    """Appends step, name and value of each figure to a file of the run directory."""

    name = "lines"
    api = ">=1.0,<2"

    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        directory: Path | None = self.context.run_directory
        if directory is not None:
            with (directory / "lines.tsv").open("a", encoding="utf-8") as file:
                file.writelines(f"{step}\t{name}\t{value}\n" for name, value in metrics.items())


class TestAboveMean(AdvantageConformance):
    plugin = AboveMean


class TestAnswerInside(RewardFunctionConformance):
    plugin = AnswerInside
    right = (("It is 42.", "42"),)
    wrong = (("It is 41.", "42"), ("", "42"))


class TestSomeTokens(SampleFilterConformance):
    plugin = SomeTokens


class TestLines(TrackerConformance):
    plugin = Lines
