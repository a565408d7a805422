"""Reward models by config: alone, and as parts of a hybrid reward with gates."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dovetail.config import config_from_mapping
from dovetail.interfaces import FailureKind, PluginContext, Prompt, RewardManager
from dovetail.plugins import make_plugin
from dovetail.plugins.load import ref_for
from dovetail_rewards.conformance.reward_model import tiny_classifier
from dovetail_rewards.managers.batch import BatchManager
from dovetail_rewards.managers.naive import NaiveManager
from dovetail_rollouts import Scorer, check_sources, configured_functions
from dovetail_sdk.testing.reward_service import reward_service


@pytest.fixture(scope="module")
def model() -> str:
    """Directory of a tiny reward model."""
    return str(tiny_classifier())


def scored(reward: dict[str, Any], samples: Any) -> dict[str, Any]:
    """What the manager of a whole config makes of the samples."""
    config = config_from_mapping({"model": {"path": "none"}, "reward": reward}).config.reward
    functions = configured_functions(config, PluginContext())
    row = Prompt(index=0, prompt_ids=[], raw="p", data_source=None, ground_truth="4", where="f")
    check_sources(functions, [row])
    manager = make_plugin(
        ref_for("reward_manager", config.manager), PluginContext(reward_functions=functions)
    )
    assert isinstance(manager, RewardManager)
    manager.start()

    async def main() -> dict[str, Any]:
        scorer = Scorer(manager, timeout=config.timeout, retries=config.retries)
        for one in samples:
            scorer.add(one, group=0, group_size=len(samples))
        return dict(await scorer.finish())

    try:
        return asyncio.run(main())
    finally:
        manager.close()


def test_rows_need_no_function_where_a_model_scores(model, sample) -> None:
    reward = {
        "manager": {"name": "reward_model", "model": model, "dtype": "float32", "device": "cpu"}
    }
    outcomes = scored(reward, [sample("a", "one"), sample("b", "two two")])
    assert outcomes["a"].value != outcomes["b"].value


def test_both_kinds_of_models_are_parts_of_a_hybrid(model, sample) -> None:
    def judge(request: Any, headers: Any) -> tuple[int, Any]:
        text = request["messages"][0]["content"]
        if "trouble" in text:
            return 503, "down"
        return 200, {"choices": [{"message": {"content": "score: 0.5"}}]}

    with reward_service(judge) as (url, requests):
        model_part = {"name": "reward_model", "model": model, "dtype": "float32", "device": "cpu"}
        judge_part = {
            "name": "judge",
            "url": url.removesuffix("/score"),
            "model": "m",
            "template": "{{ response }}",
            "backoff": 0.0,
        }
        form = {"function": {"name": "regex_format", "pattern": ".*!"}, "weight": 1.0, "gate": 1.0}
        scorers = {
            "form": form,
            "model": {"manager": model_part, "weight": 2.0},
            "judge": {"manager": judge_part, "weight": 10.0},
        }
        reward = {"manager": {"name": "hybrid", "scorers": scorers}}
        samples = [sample("fine", "4!"), sample("formless", "4"), sample("down", "trouble!")]
        outcomes = scored(reward, samples)
    fine, parts = outcomes["fine"], outcomes["fine"].components
    assert parts["judge"] == 0.5
    assert parts["model/logit"] == parts["model"]
    assert fine.value == pytest.approx(1.0 + 2.0 * parts["model"] + 5.0, abs=1e-5)
    assert outcomes["formless"].value == 0.0
    assert outcomes["formless"].components["gated"] == 1.0
    assert outcomes["down"].kind is FailureKind.UNREACHABLE
    assert "scorer 'judge'" in outcomes["down"].message
    assert len(requests) == 1 + 3, "what a gate has stopped asks no judge"


def test_a_rollout_that_is_scored_lets_every_part_sleep(sample, monkeypatch) -> None:
    asleep: list[str] = []
    monkeypatch.setattr(NaiveManager, "sleep", lambda manager: asleep.append("naive"))
    monkeypatch.setattr(BatchManager, "sleep", lambda manager: asleep.append("batch"))
    rule = {"name": "exact_match"}
    scorers = {
        "first": {"function": rule},
        "second": {"function": rule, "manager": {"name": "batch", "wait_ms": 0.0}},
    }
    outcomes = scored({"manager": {"name": "hybrid", "scorers": scorers}}, [sample()])
    assert outcomes["s0"].value == 2.0
    assert asleep == ["naive", "batch"]
