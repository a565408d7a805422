"""Conformance suites of the reward managers. Managers that call a service get a stand-in for the service from the SDK."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.manager_config import (
    BatchConfig,
    HybridConfig,
    NaiveConfig,
    ParallelConfig,
    RemoteConfig,
    ScorerSection,
)
from dovetail_rewards.managers.batch import BatchManager
from dovetail_rewards.managers.group import GroupManager
from dovetail_rewards.managers.hybrid import HybridManager
from dovetail_rewards.managers.naive import NaiveManager
from dovetail_rewards.managers.parallel import ParallelManager
from dovetail_rewards.managers.remote import RemoteManager
from dovetail_rewards.models.judge import JudgeManager
from dovetail_sdk.testing import release_hung
from dovetail_sdk.testing.conformance import RewardManagerConformance
from dovetail_sdk.testing.failing_reward import compute_score
from dovetail_sdk.testing.reward_service import reward_service

TestNaive = RewardManagerConformance.of(NaiveManager)
TestNaiveOnLists = RewardManagerConformance.of(NaiveManager, attribute="compute_scores")
TestBatch = RewardManagerConformance.of(
    BatchManager,
    BatchConfig(name="batch", size=8, wait_ms=5, calls=2),
    attribute="compute_scores",
    shares_calls=True,
)
TestBatchOfSingles = RewardManagerConformance.of(
    BatchManager, BatchConfig(name="batch", size=8, wait_ms=5, calls=2), shares_calls=True
)
TestParallel = RewardManagerConformance.of(
    ParallelManager, ParallelConfig(name="parallel", workers=2)
)
TestNaiveWithinBudget = RewardManagerConformance.of(
    NaiveManager,
    NaiveConfig(name="naive", requests_per_minute=1e6, tokens_per_minute=1e8, window=1.0),
)
TestGroup = RewardManagerConformance.of(GroupManager)


class TestHybrid(RewardManagerConformance):
    """Conformance suite of the reward manager `hybrid`."""

    plugin = HybridManager
    config = HybridConfig(
        name="hybrid",
        scorers={
            "first": ScorerSection(weight=0.5, gate=-1.0),
            "second": ScorerSection(weight=1.5, manager=BatchConfig(name="batch", wait_ms=2)),
        },
    )
    shares_calls = True

    def expected(self, value: float) -> float:
        return 2.0 * value


class TestRemote(RewardManagerConformance):
    """Conformance suite of the reward manager `remote`."""

    plugin = RemoteManager
    shares_calls = True
    url = "http://127.0.0.1:9"

    def make_config(self) -> Any:
        return RemoteConfig(name="remote", url=self.url, size=1, wait_ms=0)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with reward_service() as (self.url, _):
            try:
                yield
            finally:
                release_hung()


class TestJudge(RewardManagerConformance):
    """Conformance suite of the reward manager `judge`."""

    plugin = JudgeManager
    url = "http://127.0.0.1:9"

    def make_config(self) -> Any:
        row = "{{ [data_source, response, ground_truth, extra_info] | tojson }}"
        return JudgeConfig(name="judge", url=self.url, model="m", template=row, tries=1, workers=4)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with reward_service(judge_rows) as (self.url, _):
            try:
                yield
            finally:
                release_hung()


def judge_rows(request: Any, _headers: dict[str, str]) -> tuple[int, Any]:
    """Answer a request as a judge: return the HTTP status, and a body with the score of the suite's reward function for the row."""
    row = json.loads(request["messages"][0]["content"])
    try:
        verdict = compute_score(*row)
    except ConnectionError:
        return 503, "no judge"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function fails as a row asks
        return 400, {"error": f"{type(error).__name__}: {error}"}
    score = verdict.get("score") if isinstance(verdict, dict) else verdict
    content = f"score: {score}" if isinstance(score, float) else f"no verdict but {type(score)}"
    return 200, {"choices": [{"message": {"content": content}}]}
