"""The remote manager with a local service: requests, answers, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    FinishReason,
    PluginContext,
    Prompt,
    Score,
    Trajectory,
    Turn,
)
from dovetail.sections import RewardSection
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.manager_config import RemoteConfig
from dovetail_rewards.managers import http_post
from dovetail_rewards.managers.remote import RemoteManager
from dovetail_rewards.model_config import RewardModelConfig
from dovetail_rollouts import Scorer, check_sources, configured_functions
from dovetail_sdk.testing.reward_service import reward_service

Make = Callable[..., tuple[RemoteManager, list[Any]]]


@pytest.fixture
def remote() -> Iterator[Make]:
    """Makes a service with this answer, and a started manager that calls the service."""
    with contextlib.ExitStack() as stack:

        def make(answer: Any, **config: Any) -> tuple[RemoteManager, list[Any]]:
            url, requests = stack.enter_context(reward_service(answer))
            manager = RemoteManager(RemoteConfig(url=url, **config), PluginContext())
            manager.start()
            stack.callback(manager.close)
            return manager, requests

        yield make


def results(*entries: Any) -> Any:
    """Return an answer with these results."""
    return lambda request, headers: (200, {"results": list(entries)})


def test_an_answer_without_end_is_not_read_to_its_end(remote, sample, run, monkeypatch) -> None:
    monkeypatch.setattr(http_post, "MAX_ANSWER_BYTES", 1 << 16)
    manager, _ = remote(lambda request, headers: (200, {"results": ["x" * (1 << 20)]}))
    outcome = run(manager, [sample()])["s0"]
    assert outcome.kind is FailureKind.INVALID_VALUE
    assert "MiB" in outcome.message


def ones(request: Any, headers: Any) -> tuple[int, Any]:
    return 200, {"results": [float(s["solution_str"]) for s in request["samples"]]}


def test_what_is_sent_is_what_the_schema_says(remote, sample, run) -> None:
    manager, requests = remote(results(1.0), response_ids=True)
    row = sample(
        "a",
        "∑",
        data_source="d",
        prompt=[{"role": "user", "content": "x"}],
        extra_info={"array": np.arange(2), "n": np.int64(1)},
        response_ids=np.arange(3),
    )
    assert run(manager, [row])["a"].value == 1.0
    assert requests == [
        {
            "schema": 1,
            "samples": [
                {
                    "sample_id": "a",
                    "data_source": "d",
                    "prompt": [{"role": "user", "content": "x"}],
                    "solution_str": "∑",
                    "ground_truth": "4",
                    "extra_info": {"array": [0, 1], "n": 1},
                    "finish_reason": "stop",
                    "response_ids": [0, 1, 2],
                }
            ],
        }
    ]


def test_the_turns_of_an_episode_are_sent(remote, sample, run) -> None:
    manager, requests = remote(results(1.0))
    turn = Turn(start=0, stop=1, text="4", finish_reason=FinishReason.STOP)
    row = attrs.evolve(sample("a", "4"), trajectory=Trajectory(turns=(turn,)))
    assert run(manager, [row])["a"].value == 1.0
    assert requests[0]["samples"][0]["trajectory"] == row.trajectory.as_json()


def test_samples_go_in_batches_and_come_back_in_order(remote, sample, run) -> None:
    manager, requests = remote(ones, size=4, wait_ms=20, calls=2)
    outcomes = run(manager, [sample(f"s{i}", str(i)) for i in range(10)])
    assert [outcome.value for outcome in outcomes.values()] == [float(i) for i in range(10)]
    assert sorted(len(request["samples"]) for request in requests) == [2, 4, 4]


def test_a_result_is_a_number_a_mapping_or_an_error(remote, sample, run) -> None:
    answers = (
        0.5,
        {"score": 1, "acc": 0.25, "pred": "4"},
        {"error": "can't parse"},
        {"error": "busy", "retryable": True},
        {"token_rewards": [1.0, 2.0]},
        None,
        "1.0",
        {"score": "high"},
    )
    manager, _ = remote(results(*answers), size=8, wait_ms=20)
    outcomes = list(run(manager, [sample(f"s{i}") for i in range(8)]).values())
    assert [getattr(o, "value", None) for o in outcomes] == [0.5, 1.0, None, None, 3.0, *[None] * 3]
    assert outcomes[1].components == {"acc": 0.25}
    assert outcomes[1].extras == {"pred": "4"}
    assert outcomes[2].kind is FailureKind.EXCEPTION
    assert "can't parse" in outcomes[2].message
    assert [outcomes[i].retryable for i in (2, 3)] == [False, True]
    assert {outcome.kind for outcome in outcomes[5:]} == {FailureKind.INVALID_VALUE}


@pytest.mark.parametrize(
    ("status", "content", "kind", "retryable"),
    [
        (503, "down", FailureKind.UNREACHABLE, True),
        (429, "slow down", FailureKind.UNREACHABLE, True),
        (500, "oh", FailureKind.UNREACHABLE, True),
        (401, "who are you", FailureKind.EXCEPTION, False),
        (404, "where", FailureKind.EXCEPTION, False),
        (302, "", FailureKind.EXCEPTION, False),
        (200, b"<html>", FailureKind.INVALID_VALUE, False),
        (200, b"\xff\xfe", FailureKind.INVALID_VALUE, False),
        (200, [1.0], FailureKind.INVALID_VALUE, False),
        (200, {"scores": [1.0]}, FailureKind.INVALID_VALUE, False),
        (200, {"results": 1.0}, FailureKind.INVALID_VALUE, False),
        (200, {"results": []}, FailureKind.INVALID_VALUE, False),
        (200, {"results": [1.0, 1.0]}, FailureKind.INVALID_VALUE, False),
        (200, b'{"results": [NaN]}', FailureKind.INVALID_VALUE, False),
        (200, b'{"results": [1e999]}', FailureKind.INVALID_VALUE, False),
        (200, b'{"results": [' + b"[" * 100_000, FailureKind.INVALID_VALUE, False),
    ],
)
def test_no_bad_answer_becomes_a_number(
    remote, sample, run, status, content, kind, retryable
) -> None:
    manager, _ = remote(lambda request, headers: (status, content))
    outcome = run(manager, [sample()])["s0"]
    assert isinstance(outcome, Failure), outcome
    assert outcome.kind is kind
    assert outcome.retryable is retryable
    assert manager.config.url in outcome.message


def test_a_service_that_is_not_there_is_unreachable(sample, run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    manager = RemoteManager(RemoteConfig(url=f"http://127.0.0.1:{port}/"), PluginContext())
    manager.start()
    outcome = run(manager, [sample()], retries=1, backoff=0.01)["s0"]
    manager.close()
    assert outcome.kind is FailureKind.UNREACHABLE
    assert outcome.retryable


def test_a_password_or_key_in_the_address_stands_in_no_message(sample, run) -> None:
    url = "http://user:hunter2@127.0.0.1:9/score?key=hunter2"
    manager = RemoteManager(RemoteConfig(url=url), PluginContext())
    manager.start()
    outcome = run(manager, [sample()])["s0"]
    manager.close()
    assert "http://127.0.0.1:9/score" in outcome.message
    assert "hunter2" not in outcome.message


def test_a_service_that_comes_back_is_asked_again(remote, sample, run) -> None:
    answers = iter([(503, "starting"), (200, {"results": [1.0]})])
    manager, requests = remote(lambda request, headers: next(answers))
    assert run(manager, [sample()], retries=2, backoff=0.01)["s0"].value == 1.0
    assert len(requests) == 2


def test_a_service_that_does_not_answer_is_a_timeout(remote, sample, run) -> None:
    release = threading.Event()

    def slow(request: Any, headers: Any) -> Any:
        if request["samples"][0]["solution_str"] == "slow":
            release.wait(60.0)
        return 200, {"results": [1.0] * len(request["samples"])}

    manager, _ = remote(slow, size=1, wait_ms=0)
    outcomes = run(manager, [sample("a", "slow"), sample("b")], hang=1)
    release.set()
    assert outcomes["a"].kind is FailureKind.TIMEOUT
    assert outcomes["b"].value == 1.0


def test_the_credential_comes_from_the_environment_and_goes_nowhere_else(
    remote, sample, run, monkeypatch
) -> None:
    seen: list[dict[str, str]] = []

    def refuse(request: Any, headers: dict[str, str]) -> tuple[int, Any]:
        seen.append(headers)
        return 403, "no"

    monkeypatch.setenv("JUDGE_KEY", "secret-42")
    manager, _ = remote(refuse, auth_env="JUDGE_KEY")
    outcome = run(manager, [sample()])["s0"]
    assert seen[0]["Authorization"] == "Bearer secret-42"
    assert "secret-42" not in outcome.message
    plain, _ = remote(refuse, auth_env="JUDGE_KEY", auth_header="X-Key", auth_scheme="")
    run(plain, [sample()])
    assert seen[1]["X-Key"] == "secret-42"
    assert "Authorization" not in seen[1]


def test_a_credential_that_is_not_there_stops_the_start(monkeypatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = RemoteConfig(url="http://127.0.0.1:1/", auth_env="JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        RemoteManager(config, PluginContext()).start()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="starts with http"):
        RemoteConfig(url="judge:8000")


def test_a_row_that_json_lacks_fails_alone(remote, sample, run) -> None:
    manager, _ = remote(ones, size=3, wait_ms=20)
    rows = [sample("a", "1"), sample("b", "2", extra_info={"o": object()}), sample("c", "3")]
    outcomes = run(manager, rows)
    assert [getattr(o, "value", None) for o in outcomes.values()] == [1.0, None, 3.0]
    assert "JSON" in outcomes["b"].message


def test_one_client_lives_through_several_rollouts(remote, sample) -> None:
    manager, _ = remote(ones)

    async def main(name: str) -> Any:
        scorer = Scorer(manager, timeout=10.0)
        scorer.add(sample(name, "1"), group=0, group_size=1)
        return await scorer.finish()

    clients = []
    for name in ("a", "b"):
        assert isinstance(asyncio.run(main(name))[name], Score)
        clients.append(manager._service._post._client)
    assert clients[0] is clients[1]


@pytest.mark.parametrize(
    "manager",
    [
        RemoteConfig(name="remote", url="http://127.0.0.1:1/"),
        RewardModelConfig(name="reward_model", model="m"),
        JudgeConfig(name="judge", url="http://127.0.0.1:1/", model="m", template="{{ response }}"),
    ],
)
def test_rows_need_no_function_where_a_service_or_a_model_scores(manager) -> None:
    section = RewardSection(manager=manager)
    prompt = Prompt(
        index=0,
        prompt_ids=np.arange(2),
        raw="",
        data_source="anything",
        ground_truth=None,
        where="row 0",
    )
    check_sources(configured_functions(section, PluginContext()), [prompt])
