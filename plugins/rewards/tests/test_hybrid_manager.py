"""The hybrid manager: weights, gates, separate components, and no sum if a scorer fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.config import config_from_mapping
from dovetail.config.serialise import to_mapping
from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    PluginContext,
    Prompt,
    Score,
)
from dovetail.sections import PluginSection, RewardSection
from dovetail_rewards.config import ExactMatchConfig
from dovetail_rewards.manager_config import (
    BatchConfig,
    GroupConfig,
    HybridConfig,
    NaiveConfig,
    ParallelConfig,
    ScorerSection,
)
from dovetail_rewards.managers.batch import BatchManager
from dovetail_rewards.managers.hybrid import HybridManager
from dovetail_rewards.managers.naive import NaiveManager
from dovetail_rollouts import check_sources, configured_functions


@pytest.fixture
def hybrid(started: Any) -> Callable[..., HybridManager]:
    return lambda function=None, **config: started(
        HybridManager, HybridConfig(name="hybrid", **config), function
    )


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], PluginSection]:
    """Writes a reward function with this body to a file."""

    def make(body: str, name: str = "f") -> PluginSection:
        place = tmp_path / f"{name}.py"
        place.write_text(
            f"def compute_score(solution_str, ground_truth, extra_info=None):\n{body}\n"
        )
        return PluginSection(path=str(place))

    return make


FORMAT = ExactMatchConfig(name="exact_match", extract="<a>(.*)</a>")


def parts(outcome: Any) -> dict[str, float]:
    """Return the scorers' scores, without components that their functions returned."""
    return {name: value for name, value in outcome.components.items() if "/" not in name}


def test_the_score_is_the_weighted_sum_and_components_are_apart(hybrid, sample, run) -> None:
    manager = hybrid(
        lambda solution_str: {"score": 0.5, "length": len(solution_str), "pred": "p"},
        scorers={
            "format": ScorerSection(function=FORMAT, weight=0.2),
            "answer": ScorerSection(weight=2.0),
            "seen": ScorerSection(function=PluginSection(name="exact_match"), weight=0.0),
        },
    )
    outcomes = run(manager, [sample("a", "<a>4</a>"), sample("b", "4")])
    assert outcomes["a"].value == pytest.approx(0.2 + 1.0)
    assert parts(outcomes["a"]) == {"format": 1.0, "answer": 0.5, "seen": 0.0}
    assert outcomes["a"].components["answer/length"] == 8.0
    assert outcomes["a"].extras["answer/pred"] == "p"
    assert outcomes["b"].value == pytest.approx(1.0)
    assert outcomes["b"].components["seen"] == 1.0


def test_what_comes_after_a_gate_is_not_run_below_it(hybrid, sample, run) -> None:
    judged: list[str] = []

    def judge(solution_str):
        judged.append(solution_str)
        return 0.7

    scorers = {
        "format": ScorerSection(function=FORMAT, weight=0.5, gate=1.0),
        "judge": ScorerSection(skipped=-2.0),
    }
    rows = [sample("good", "<a>4</a>"), sample("bad", "4")]
    outcomes = run(hybrid(judge, scorers=scorers, gated_score=-1.0), rows)
    assert judged == ["<a>4</a>"]
    assert outcomes["good"].value == pytest.approx(0.5 + 0.7)
    assert parts(outcomes["good"]) == {"format": 1.0, "judge": 0.7, "gated": 0.0}
    assert outcomes["bad"].value == -1.0
    assert parts(outcomes["bad"]) == {"format": 0.0, "judge": -2.0, "gated": 1.0}
    summed = run(hybrid(judge, scorers=scorers, gated_score=None), rows)
    assert summed["bad"].value == pytest.approx(0.5 * 0.0 - 2.0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ConnectionRefusedError("no"), FailureKind.UNREACHABLE),
        (float("nan"), FailureKind.INVALID_VALUE),
    ],
)
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_part_that_fails_fails_the_sample_with_its_kind(
    hybrid, sample, run, answer, kind, weight
) -> None:
    def judge():
        if isinstance(answer, Exception):
            raise answer
        return answer

    scorers = {"format": ScorerSection(function=FORMAT), "judge": ScorerSection(weight=weight)}
    outcome = run(hybrid(judge, scorers=scorers), [sample(text="<a>4</a>")])["s0"]
    assert isinstance(outcome, Failure)
    assert outcome.kind is kind
    assert outcome.message.startswith("scorer 'judge': ")
    assert outcome.retryable is (kind is FailureKind.UNREACHABLE)


def test_a_sum_that_overflows_is_a_failure(hybrid, sample, run) -> None:
    manager = hybrid(lambda: 3e38, scorers={"a": ScorerSection(weight=10.0)})
    assert run(manager, [sample()])["s0"].kind is FailureKind.INVALID_VALUE


def test_token_rewards_carry_the_rest_on_the_last_token(hybrid, sample, run, file) -> None:
    scorers = {
        "tokens": ScorerSection(weight=2.0),
        "plain": ScorerSection(function=file("    return 3.0"), weight=0.5),
    }
    manager = hybrid(lambda: {"token_rewards": [0.5, 0.0, 0.25]}, scorers=scorers)
    outcome = run(manager, [sample(response_ids=np.arange(3))])["s0"]
    assert isinstance(outcome, Score), outcome
    assert outcome.value == pytest.approx(1.5 + 1.5)
    np.testing.assert_allclose(outcome.token_rewards, [1.0, 0.0, 2.0])


def test_each_scorer_is_run_by_the_manager_that_it_asks_for(hybrid, sample, run, file) -> None:
    scorers = {
        "process": ScorerSection(
            function=file("    import os\n    return {'score': 1.0, 'pid': os.getpid()}"),
            manager=ParallelConfig(name="parallel", workers=1),
        ),
        "lists": ScorerSection(manager=BatchConfig(name="batch", size=4, wait_ms=5)),
    }
    sizes: list[int] = []

    def on_lists(solution_strs):
        sizes.append(len(solution_strs))
        return [1.0] * len(solution_strs)

    import os

    outcomes = run(hybrid(on_lists, scorers=scorers), [sample(f"s{i}") for i in range(8)])
    assert sizes == [4, 4]
    for outcome in outcomes.values():
        assert outcome.value == 2.0
        assert outcome.components["process/pid"] != os.getpid()


def test_capacities_of_the_parts_hold_and_waiting_for_them_does_not_count(
    hybrid, sample, watched
) -> None:
    both, release = threading.Barrier(3), threading.Event()
    most, running = 0, set()

    def judge(solution_str):
        nonlocal most
        running.add(solution_str)
        most = max(most, len(running))
        if not release.is_set():
            both.wait(60.0)
            release.wait(60.0)
        running.discard(solution_str)
        return 1.0

    manager = hybrid(
        judge, scorers={"judge": ScorerSection(manager=NaiveConfig(name="naive", workers=2))}
    )
    times = [watched() for _ in range(10)]
    calls = [([sample(f"s{i}", str(i))], time) for i, time in enumerate(times)]

    async def main() -> Any:
        scoring = asyncio.gather(*starmap(manager.score, calls))
        await asyncio.to_thread(both.wait, 60.0)
        counted = {str(i) for i, time in enumerate(times) if time.counts}
        assert counted == running, "the time of those that run counts, and of no other"
        release.set()
        return await scoring

    assert [outcome.value for (outcome,) in asyncio.run(main())] == [1.0] * 10
    assert most == 2


def test_a_rollout_that_is_scored_lets_every_part_sleep(hybrid, sample, run, monkeypatch) -> None:
    asleep: list[str] = []
    for manager in (NaiveManager, BatchManager):
        monkeypatch.setattr(manager, "sleep", lambda self: asleep.append(self.name))
    lists = BatchConfig(name="batch", wait_ms=0.0)
    scorers = {
        "first": ScorerSection(function=FORMAT),
        "second": ScorerSection(function=FORMAT, manager=lists),
    }
    run(hybrid(scorers=scorers), [sample()])
    assert asleep == ["naive", "batch"]


def test_a_manager_of_groups_is_refused(hybrid) -> None:
    with pytest.raises(ConfigError, match="manager=group scores whole groups"):
        hybrid(lambda: 1.0, scorers={"a": ScorerSection(manager=GroupConfig(name="group"))})


def row(source: str | None, truth: object) -> Prompt:
    return Prompt(
        index=0,
        prompt_ids=np.arange(2),
        raw="",
        data_source=source,
        ground_truth=truth,
        where="row 0",
    )


def test_rows_need_a_source_only_where_a_scorer_takes_the_rows_own_function() -> None:
    gsm = {"a": ScorerSection(function=PluginSection(name="gsm8k"))}
    own = RewardSection(manager=HybridConfig(name="hybrid", scorers=gsm))
    check_sources(configured_functions(own, PluginContext()), [row(None, "18")])
    with pytest.raises(DataError, match="ground truth 'x'"):
        check_sources(configured_functions(own, PluginContext()), [row(None, "x")])
    both = RewardSection(manager=HybridConfig(name="hybrid", scorers={**gsm, "b": ScorerSection()}))
    with pytest.raises(ConfigError, match="no reward function"):
        check_sources(configured_functions(both, PluginContext()), [row("unknown", "18")])


def test_it_is_configured_by_names_alone() -> None:
    mapping = {
        "model": {"path": "m"},
        "reward": {
            "manager": {
                "name": "hybrid",
                "scorers": {
                    "format": {
                        "function": {"name": "exact_match", "extract": "a$"},
                        "weight": 0.5,
                        "gate": 1,
                    },
                    "answer": {"manager": {"name": "parallel", "workers": 2}},
                },
            }
        },
    }
    loaded = config_from_mapping(mapping).config
    scorers = loaded.reward.manager.scorers
    assert isinstance(scorers["format"].function, ExactMatchConfig)
    assert scorers["format"].gate == 1.0
    assert isinstance(scorers["answer"].manager, ParallelConfig)
    assert isinstance(scorers["format"].manager, NaiveConfig)
    assert scorers["answer"].function is None
    assert config_from_mapping(to_mapping(loaded)).config == loaded
    with pytest.raises(ConfigError, match="scorers"):
        config_from_mapping({"model": {"path": "m"}, "reward": {"manager": {"name": "hybrid"}}})
