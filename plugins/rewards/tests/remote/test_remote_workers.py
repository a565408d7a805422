"""`remote` with workers: scores from other processes, and the outcomes of samples whose worker dies or hangs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail.interfaces import FailureKind, FinishReason, PluginContext, Trajectory, Turn
from dovetail.sections import PluginSection, RewardSection
from dovetail_rewards.manager_config import NaiveConfig, ParallelConfig, RemoteConfig
from dovetail_rewards.managers.remote import RemoteManager
from dovetail_rollouts import configured_functions

FILE = """
import os, re, signal, time

def compute_score(solution_str, ground_truth, extra_info=None):
    if solution_str == "die" or (solution_str == "die once" and not os.path.exists(extra_info["flag"])):
        if extra_info:
            open(extra_info["flag"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "block":  # in one call, without ever giving the interpreter's lock back
        re.match(r"(a+)+$", "a" * 40 + "b")
    if solution_str == "sleep":
        time.sleep(600)
    if solution_str == "raise":
        raise ValueError("no")
    return {"score": len(solution_str), "pid": str(os.getpid())}
"""


@pytest.fixture
def remote(tmp_path: Path, runtime: Any) -> Iterator[Callable[..., RemoteManager]]:
    """Makes started managers over two workers and the function above."""
    file = tmp_path / "my_reward.py"
    file.write_text(FILE)
    functions = configured_functions(
        RewardSection(function=PluginSection(path=str(file))), PluginContext()
    )
    made: list[RemoteManager] = []

    def make(**config: Any) -> RemoteManager:
        settings = {"workers": 2, "size": 4, "wait_ms": 1, **config}
        context = PluginContext(reward_functions=functions, runtime=runtime)
        made.append(RemoteManager(RemoteConfig(name="remote", **settings), context))
        made[-1].start()
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def pids(outcomes: dict[str, Any]) -> set[int]:
    return {int(outcome.extras["pid"]) for outcome in outcomes.values()}


def test_scores_come_from_all_workers_in_order(remote, sample, run, runtime) -> None:
    manager = remote(calls=1)
    outcomes = run(manager, [sample(f"s{i}", "x" * i) for i in range(24)])
    assert [outcome.value for outcome in outcomes.values()] == list(map(float, range(24)))
    assert pids(outcomes) == {worker.process.pid for worker in runtime.workers}
    assert os.getpid() not in pids(outcomes)


def test_a_worker_that_is_killed_between_batches_is_replaced(remote, sample, run, runtime) -> None:
    manager = remote(workers=1)
    run(manager, [sample()])
    runtime.workers[0].kill()
    outcomes = run(manager, [sample("a", "four"), sample("b", "four")])
    assert [outcome.value for outcome in outcomes.values()] == [4.0, 4.0]
    assert pids(outcomes) == {runtime.workers[1].process.pid}


def test_samples_of_a_worker_that_nobody_can_start_again_are_scored_elsewhere(
    remote, sample, run, runtime, monkeypatch
) -> None:
    """The runtime may raise any error, also one that is not a DovetailError."""
    manager = remote(restarts=1)
    run(manager, [sample()])
    runtime.workers[0].kill()

    def start(number: int, spec: Any) -> Any:
        raise KeyError(number)

    monkeypatch.setattr(runtime, "start", start)
    outcomes = run(manager, [sample(f"s{i}", "four") for i in range(8)])
    assert [outcome.value for outcome in outcomes.values()] == [4.0] * 8
    assert pids(outcomes) == {runtime.workers[1].process.pid}


def test_a_sample_that_kills_its_worker_fails_alone(remote, sample, run) -> None:
    manager = remote(workers=1, restarts=3)
    texts = ["fine", "die", "good", "well"]
    outcomes = run(manager, [sample(text, text, extra_info=None) for text in texts])
    assert [outcomes[text].value for text in ("fine", "good", "well")] == [4.0] * 3
    assert outcomes["die"].kind is FailureKind.CRASH
    assert outcomes["die"].retryable
    assert re.search(
        r"die, scored alone, failed: worker 0 \(pid \d+\) died: SIGKILL", outcomes["die"].message
    )


def test_a_sample_that_met_a_bad_moment_is_scored_after_all(remote, sample, run, tmp_path) -> None:
    rows = [
        sample("a", "die once", extra_info={"flag": str(tmp_path / "flag")}),
        sample("b", "two"),
    ]
    outcomes = run(remote(workers=1), rows)
    assert [outcome.value for outcome in outcomes.values()] == [8.0, 3.0]


def test_workers_that_only_die_are_given_up(remote, sample, run) -> None:
    manager = remote(workers=1, restarts=0)
    outcomes = run(manager, [sample(f"s{i}", "die") for i in range(3)])
    for outcome in outcomes.values():
        assert outcome.kind is FailureKind.CRASH
    assert "worker 0" in outcomes["s2"].message


def test_a_call_that_hangs_is_a_timeout_of_its_own_sample(remote, sample, run, runtime) -> None:
    manager = remote(workers=1)
    outcomes = run(manager, [sample("slow", "sleep"), sample("quick", "fine")], timeout=2.0)
    assert outcomes["slow"].kind is FailureKind.TIMEOUT
    assert outcomes["quick"].value == 4.0
    assert len(runtime.workers) == 1


def test_a_worker_that_gives_no_sign_of_life_is_killed(remote, sample, run, runtime) -> None:
    manager = remote(workers=1)
    outcomes = run(manager, [sample("stuck", "block"), sample("quick", "fine")], timeout=2.0)
    assert outcomes["quick"].value == 4.0
    assert outcomes["stuck"].kind is FailureKind.TIMEOUT
    assert "within 2 s" in outcomes["stuck"].message
    assert runtime.workers[0].lost


def test_processes_within_a_worker_are_killed_and_it_lives(remote, sample, run, runtime) -> None:
    inner = ParallelConfig(name="parallel", workers=1)
    manager = remote(workers=1, manager=inner)
    outcomes = run(manager, [sample("stuck", "block"), sample("quick", "fine")], timeout=2.0)
    assert outcomes["quick"].value == 4.0
    assert outcomes["stuck"].kind is FailureKind.TIMEOUT
    assert runtime.workers[0].lost is None


def test_errors_and_rows_that_do_not_travel_are_failures(remote, sample, run) -> None:
    rows = [sample("a", "raise"), sample("b", "fine", extra_info={"x": lambda: 0}), sample("c")]
    outcomes = run(remote(), rows)
    assert outcomes["a"].kind is FailureKind.EXCEPTION
    assert "my_reward.py:compute_score raised ValueError: no" in outcomes["a"].message
    assert outcomes["b"].kind is FailureKind.EXCEPTION
    assert "lambda" in outcomes["b"].message
    assert outcomes["c"].value == 1.0


SEES = """
from dovetail.interfaces import RewardManager, Score

class Sees(RewardManager):
    name, api = "sees", ">=1.2,<2"

    async def score(self, samples, time):
        (sample,) = samples
        prompt, completion = sample.prompt, sample.completion
        seen = {
            **sample.arguments(),
            "tokens_of_the_prompt": len(prompt.prompt_ids),
            "log_probs": completion.log_probs,
            "raw_log_probs": completion.raw_log_probs,
            "versions": len(completion.weight_versions),
            "produced": sample.response_length,
        }
        return [Score(value=1.0, extras={"seen": seen})]
"""


def test_workers_get_the_row_and_the_response_and_nothing_else(
    remote, sample, run, tmp_path
) -> None:
    file = tmp_path / "sees.py"
    file.write_text(SEES)
    manager = remote(manager=PluginSection(path=str(file), attribute="Sees"))
    row = sample("a", "4", data_source="d", extra_info={"x": 1}, response_ids=np.arange(3))
    row = attrs.evolve(
        row,
        prompt=attrs.evolve(row.prompt, prompt_ids=np.arange(5)),
        completion=attrs.evolve(
            row.completion,
            log_probs=np.zeros(3, np.float32),
            raw_log_probs=np.zeros(3, np.float32),
        ),
    )
    assert run(manager, [row])["a"].extras["seen"] == {
        "data_source": "d",
        "prompt": "2 + 2 =",
        "solution_str": "4",
        "ground_truth": "4",
        "extra_info": {"x": 1},
        "finish_reason": "stop",
        "response_ids": [0, 1, 2],
        "tokens_of_the_prompt": 0,
        "log_probs": None,
        "raw_log_probs": None,
        "versions": 0,
        "produced": 3,
        "trajectory": None,
    }


EPISODE = Trajectory(turns=(Turn(start=0, stop=2, text="4", finish_reason=FinishReason.STOP),))


def test_workers_get_the_turns_of_an_episode(remote, sample, run, tmp_path) -> None:
    file = tmp_path / "sees.py"
    file.write_text(SEES)
    manager = remote(manager=PluginSection(path=str(file), attribute="Sees"))
    row = sample("a", "4", response_ids=np.arange(3))
    shown_T = np.array([True, True, False])
    row = attrs.evolve(
        row,
        trajectory=EPISODE,
        completion=attrs.evolve(row.completion, response_mask=shown_T),
    )
    seen = run(manager, [row])["a"].extras["seen"]
    assert seen["trajectory"] == EPISODE.as_json()
    assert seen["produced"] == 2


def test_what_the_workers_reserve_is_asked_of_the_runtime(remote, runtime) -> None:
    remote(workers=2, accelerators=1, cpus=2.0, start_timeout=9.0)
    (spec,) = runtime.specs
    assert attrs.asdict(spec, filter=lambda a, _: a.name != "setup") == {
        "label": "reward",
        "target": "dovetail_rewards.managers.scoring_task:make_task",
        "count": 2,
        "cpus": 2.0,
        "accelerators": 1,
        "start_timeout": 9.0,
    }


def test_there_must_be_a_runtime_with_workers() -> None:
    manager = RemoteManager(RemoteConfig(name="remote", workers=2), PluginContext())
    with pytest.raises(ConfigError, match="workers=2") as caught:
        manager.start()
    assert "reward.manager.name=parallel" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("settings", "given"),
    [({}, "neither `url` nor `workers` is"), ({"url": "http://h", "workers": 1}, "both")],
)
def test_there_is_one_place_to_score(settings, given) -> None:
    with pytest.raises(ValueError, match=f"{given} set"):
        RemoteConfig(name="remote", **settings)


def test_functions_are_needed_where_the_inner_manager_needs_them() -> None:
    inner = NaiveConfig(name="naive")
    assert RemoteManager.needs_functions(RemoteConfig(name="remote", workers=1, manager=inner))
    assert not RemoteManager.needs_functions(RemoteConfig(name="remote", url="http://h"))
    chosen = RemoteManager.selects(RemoteConfig(name="remote", workers=1, manager=inner))
    assert chosen == {"manager": ("reward_manager", inner)}
