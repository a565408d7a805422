"""A user played by a second model, which a local server of chat completions stands in for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import Drawn, Policy, draw, said

from dovetail.interfaces import Failure, FailureKind, PluginContext
from dovetail_environments.config import (
    EnvironmentRowsConfig,
    EnvironmentsConfig,
    SimulatedUserConfig,
)
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_environments.rows import EnvironmentRows
from dovetail_environments.worker_pool import EnvironmentProcessError
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.fake_server import FakeServer, reply, words_of

TASK = {
    "user": "You want your money back. Your order is 17.",
    "opening": "I want my money back!",
    "system": "You help customers.",
}


class User(FakeServer):
    """The user's model, which knows its order number and is satisfied when the policy names the number."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answers["/v1/chat/completions"] = self._answer

    def _answer(self, request: Any) -> None:
        body = json.loads(request.body)
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        heard = body["messages"][-1]["content"]
        text = "Thank you. [satisfied]" if "17" in heard else "It is order 17."
        if "never" in heard:
            text = "[Unsatisfied]"
        words_of({"choices": [{"message": {"role": "assistant", "content": text}}]})(request)


@pytest.fixture
def user() -> Iterator[User]:
    with User() as server:
        yield server


def section(
    user: User, folder: Path, *tasks: dict[str, Any], **settings: Any
) -> SimulatedUserConfig:
    file = folder / "users.jsonl"
    file.write_text("".join(f"{json.dumps(task)}\n" for task in tasks or (TASK,)))
    given = {"file": str(file), "url": f"{user.url}/v1", "model": "user", "workers": 2, **settings}
    return SimulatedUserConfig(name="simulated_user", **given)


def rows_of(config: SimulatedUserConfig, path: str = "it") -> Any:
    rows = EnvironmentRowsConfig(name="environments", environments={"it": config})
    return EnvironmentRows(rows, PluginContext()).read([path])


def drawn(config: SimulatedUserConfig, policy: Policy, n: int = 1) -> Drawn:
    loop_config = EnvironmentsConfig(name="environments", environments={"it": config})
    loop = EnvironmentsLoop(loop_config, PluginContext(tokenizer=template_tokenizer(CHATML)))
    [row] = rows_of(config)
    loop.start()
    try:
        return draw(loop, policy, n=n, messages=row["prompt"], extra_info=row["extra_info"])
    finally:
        loop.close()


def output(found: Drawn) -> Any:
    assert found.sample.trajectory is not None
    assert not isinstance(found.sample.outcome, Failure), found.sample.outcome
    return found.sample.trajectory.output


def test_the_user_answers_and_ends_the_conversation(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USERS_KEY", "secret")
    config = section(user, tmp_path, auth_env="USERS_KEY", extra_body={"temperature": 0.5})
    found = drawn(config, said("Which order?", "Order 17 is paid back."))
    found.audit()
    assert output(found)["reward"] == 1.0
    assert output(found)["parts"] == {"satisfied": 1.0, "turns": 2}
    assert len(found.sample.sequences) == 1
    first = user.requests[0]
    assert (first["model"], first["temperature"]) == ("user", 0.5)
    assert [message["role"] for message in first["messages"]] == ["system", "assistant", "user"]
    assert first["messages"][0]["content"].startswith(TASK["user"])
    assert [message["content"] for message in first["messages"][1:]] == [
        TASK["opening"],
        "Which order?",
    ]
    assert [message["content"] for message in user.requests[1]["messages"][3:]] == [
        "It is order 17.",
        "Order 17 is paid back.",
    ]
    assert set(user.keys) == {"Bearer secret"}


def test_what_the_user_knows_is_not_shown_to_the_policy(user: User, tmp_path: Path) -> None:
    prompts: list[str] = []

    def policy(request: Any, prompt: str) -> str:
        prompts.append(prompt)
        return ("Which order?", "Order 17.")[request.streams[0].turn]

    drawn(section(user, tmp_path), policy)
    assert TASK["system"] in prompts[0]
    assert not any("You want" in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("turns", "answer", "reward", "satisfied", "count"),
    [
        (("I will never do that.",), None, 0.0, 0.0, 1),
        (("What?",), None, 0.0, 0.0, 3),
        (("17 it is.",), "refund 17", 0.0, 1.0, 1),
        (("refund 17 is made.",), "refund 17", 1.0, 1.0, 1),
    ],
    ids=["unsatisfied", "too long", "satisfied but wrong", "right"],
)
def test_rewards_are_the_users_word_or_the_answer(
    user: User, tmp_path: Path, turns: Any, answer: Any, reward: float, satisfied: float, count: int
) -> None:
    task = TASK if answer is None else {**TASK, "answer": answer}
    found = output(drawn(section(user, tmp_path, task, turns=3), said(*turns)))
    assert found["reward"] == reward
    assert found["parts"] == {"satisfied": satisfied, "turns": count}


REFUSAL = {"error": {"code": "context_length_exceeded", "message": "too long for the user"}}
FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "empty": (words_of({"choices": [{"message": {"content": " "}}]}), "an empty answer"),
    "error": (words_of({"error": {"message": "no such model"}}, 404), "no such model"),
    "page": (lambda request: reply(request, 502, b"<html>"), "failed"),
    "context": (words_of(REFUSAL, 400), "too long for the user"),
    "other": (words_of({"answer": "hello"}), "choices"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_users_model_that_fails_is_a_failure_and_no_score(
    user: User, tmp_path: Path, case: str
) -> None:
    user.answers["/v1/chat/completions"], message = FAULTS[case]
    outcome = drawn(section(user, tmp_path), said("Hello.")).sample.outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.ENVIRONMENT
    assert message in outcome.message
    assert user.url in outcome.message


def test_a_server_that_is_not_there_and_one_that_hangs_are_failures(
    user: User, tmp_path: Path
) -> None:
    gone = section(user, tmp_path, url="http://127.0.0.1:9/v1")
    outcome = drawn(gone, said("Hello.")).sample.outcome
    assert isinstance(outcome, Failure)
    assert "http://127.0.0.1:9/v1 failed" in outcome.message
    user.answers["/v1/chat/completions"] = lambda _: user.release.wait() and None
    outcome = drawn(section(user, tmp_path, episode_seconds=2.0), said("Hello.")).sample.outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.LIMIT


def test_lines_of_the_file_are_tasks_and_bad_ones_are_named(user: User, tmp_path: Path) -> None:
    tasks = [{**TASK, "opening": f"Hello {n}", "answer": n} for n in range(5)]
    config = section(user, tmp_path, *tasks, tasks=3, held_out=9)
    assert [row["prompt"][1]["content"][-1] for row in rows_of(config)] == ["0", "1", "2"]
    held_out = rows_of(config, "it/held_out")
    assert [row["reward_model"]["ground_truth"] for row in held_out] == [3, 4]
    with pytest.raises(EnvironmentProcessError, match=r"users\.jsonl, line 2 lacks .*user"):
        rows_of(section(user, tmp_path, TASK, {"opening": "Hello"}))


@pytest.mark.parametrize("given", [{"url": "127.0.0.1:8000"}, {"model": ""}, {"file": " "}])
def test_an_address_a_model_and_a_file_have_to_be_given(given: dict[str, str]) -> None:
    right = {"file": "users.jsonl", "url": "http://127.0.0.1:1/v1", "model": "user"}
    with pytest.raises(ValueError, match=next(iter(given))):
        SimulatedUserConfig(name="simulated_user", **{**right, **given})
