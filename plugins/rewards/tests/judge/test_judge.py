"""The judge with a local server for chat completions: requests, parsing, and failures."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dovetail.interfaces import Failure, FailureKind, PluginContext, Score
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.models.judge import JudgeManager
from dovetail_sdk.testing.fake_server import FakeServer, reply

TEMPLATE = "Question: {{ prompt }}\nAnswer: {{ response }}\nGrade it."
Reply = Callable[[dict[str, Any]], tuple[int, Any, dict[str, str]]]


class ChatServer(FakeServer):
    """A server with given answers, which records requests."""

    def __init__(self, answer: Reply) -> None:
        super().__init__()
        self.url += "/v1"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0
        self._answer, self._lock = answer, threading.Lock()
        self.answers["*"] = self._reply

    def _reply(self, request: Any) -> None:
        body = json.loads(request.body)
        with self._lock:
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            self.running += 1
            self.most = max(self.most, self.running)
        status, value, headers = self._answer(body)
        with self._lock:
            self.running -= 1
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        with contextlib.suppress(OSError):
            reply(request, status, content, headers=headers)


def says(text: Any, **usage: Any) -> tuple[int, Any, dict[str, str]]:
    """Return a chat completion with this text."""
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"index": 0, "message": message}], "usage": usage or None}, {}


def in_turn(*replies: Any) -> Reply:
    """Return each reply once, and then the last reply forever; a text is a completion."""
    left, lock = list(replies), threading.Lock()

    def reply(_: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        with lock:
            chosen = left.pop(0) if len(left) > 1 else left[0]
        return chosen if isinstance(chosen, tuple) else says(chosen)

    return reply


@pytest.fixture
def judge() -> Iterator[Callable[..., tuple[JudgeManager, ChatServer]]]:
    """Makes a server with this reply, and a started judge that calls the server."""
    with contextlib.ExitStack() as stack:

        def make(reply: Any, **config: Any) -> tuple[JudgeManager, ChatServer]:
            server = ChatServer(reply if callable(reply) else in_turn(reply))
            stack.callback(server.close)
            given = {"model": "m", "template": TEMPLATE, "backoff": 0.001, **config}
            manager = JudgeManager(JudgeConfig(url=server.url, **given), PluginContext())
            manager.start()
            stack.callback(manager.close)
            return manager, server

        yield make


def test_what_is_asked_is_a_chat_completion_of_the_filled_templates(
    judge, sample, run, monkeypatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    manager, server = judge(
        "It is fine. Score: 7",
        system="Grade by {{ extra_info['rubric'] }}. Truth: {{ ground_truth }}",
        extra_body={"seed": 5},
        auth_env="JUDGE_KEY",
        temperature=0.5,
        max_tokens=9,
    )
    row = sample(
        "a",
        "{{ 7 * 7 }}",
        prompt=[{"role": "user", "content": "2+2?"}],
        extra_info={"rubric": "rigour"},
    )
    outcome = run(manager, [row])["a"]
    assert outcome.value == 7.0
    assert outcome.extras == {"judgement": "It is fine. Score: 7"}
    assert server.asked == ["/v1/chat/completions"]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.requests == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Grade by rigour. Truth: 4"},
                {"role": "user", "content": "Question: 2+2?\nAnswer: {{ 7 * 7 }}\nGrade it."},
            ],
            "temperature": 0.5,
            "max_tokens": 9,
            "seed": 5,
        }
    ]


@pytest.mark.parametrize(
    ("text", "config", "value"),
    [
        ("score: 3 ... no: Score = -4.5", {}, -4.5),
        ("**Score:** 8/10", {"low": 0, "high": 10, "normalise": True}, 0.8),
        ("[[B]] after all [[A]]", {"pattern": r"\[\[(\w)\]\]", "labels": {"a": 1, "b": 0}}, 1.0),
        ("score:  .5e-1", {}, 0.05),
        ("x=1 y=2", {"pattern": r"x=(\d) y=(?P<score>\d)"}, 2.0),
        ("yes", {"pattern": "yes|no", "labels": {"Yes": 0.5, "no": 0}}, 0.5),
        ('{"score": 1} then ```json\n{"why": {"a": 1}, "score": 2}\n```', {"parse": "json"}, 2.0),
        ('{"verdict": "4"}', {"parse": "json", "field": "verdict"}, 4.0),
        ("score: 1" + " x" * 20_000 + " score: 6", {}, 6.0),
    ],
)
def test_the_last_verdict_of_an_answer_is_the_score(
    judge, sample, run, text, config, value
) -> None:
    manager, _ = judge(text, **config)
    assert run(manager, [sample()])["s0"].value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("I can't say.", {}),
        ("", {}),
        ("score: 11", {"low": 0, "high": 10}),
        ("score: -1", {"low": 0}),
        ("maybe", {"pattern": r"\w+", "labels": {"yes": 1}}),
        ('{"score": NaN}', {"parse": "json"}),
        ('{"score": true}', {"parse": "json"}),
        ('{"score": [1]}', {"parse": "json"}),
        ('{"score": 1', {"parse": "json"}),
        ('{"scores": 1}', {"parse": "json"}),
        ("score: " + "9" * 60, {}),
        ("inf", {"pattern": "inf"}),
        ('{"a":' * 3000, {"parse": "json"}),
    ],
)
def test_an_answer_without_a_verdict_is_no_score(judge, sample, run, text, config) -> None:
    manager, server = judge(text, **config)
    outcome = run(manager, [sample()])["s0"]
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.INVALID_VALUE
    assert len(server.requests) == 1, "a judge at temperature 0 says the same again"


def test_a_judge_that_draws_its_words_is_asked_again(judge, sample, run) -> None:
    manager, server = judge(in_turn("hm", "score: 1"), temperature=1.0)
    assert run(manager, [sample()])["s0"].value == 1.0
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("reply", "kind", "requests"),
    [
        ((429, "slow down", {}), FailureKind.UNREACHABLE, 3),
        ((500, "broken", {}), FailureKind.UNREACHABLE, 3),
        ((503, b"\xff\xfe", {}), FailureKind.UNREACHABLE, 3),
        ((401, "who?", {}), FailureKind.EXCEPTION, 1),
        ((404, "no such model", {}), FailureKind.EXCEPTION, 1),
        ((200, b"<html>proxy</html>", {}), FailureKind.INVALID_VALUE, 3),
        ((200, {"choices": []}, {}), FailureKind.INVALID_VALUE, 3),
        ((200, [1], {}), FailureKind.INVALID_VALUE, 3),
        ((200, 1.0, {}), FailureKind.INVALID_VALUE, 3),
        (says(None), FailureKind.INVALID_VALUE, 3),
        ((301, "elsewhere", {"Location": "http://127.0.0.1:9/"}), FailureKind.EXCEPTION, 1),
    ],
)
def test_whatever_the_endpoint_does_is_its_kind_and_never_a_number(
    judge, sample, run, reply, kind, requests
) -> None:
    manager, server = judge(reply)
    outcome = run(manager, [sample()])["s0"]
    assert isinstance(outcome, Failure)
    assert outcome.kind is kind
    assert len(server.requests) == requests


def test_what_passes_is_tried_again_until_it_has_passed(judge, sample, run) -> None:
    manager, server = judge(
        in_turn((429, "slow down", {"Retry-After": "0.2"}), (500, "broken", {}), "score: 2")
    )
    assert run(manager, [sample()])["s0"].value == 2.0
    assert len(server.requests) == 3


def test_pauses_are_no_running_time(judge, sample, waited) -> None:
    manager, _ = judge(in_turn((429, "slow down", {"Retry-After": "0.2"}), "score: 2"))
    assert waited(manager, [sample()]) >= 0.2


def test_a_judge_that_is_not_there_is_unreachable(sample, run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        config = JudgeConfig(url=url, model="m", template=TEMPLATE, backoff=0.001)
        manager = JudgeManager(config, PluginContext())
        manager.start()
        outcome = run(manager, [sample()])["s0"]
        manager.close()
    assert outcome.kind is FailureKind.UNREACHABLE
    assert outcome.retryable
    assert "can't be reached" in outcome.message


@pytest.mark.parametrize("request_timeout", [2.0, None])
def test_a_judge_that_hangs_is_a_timeout(judge, sample, run, clock, request_timeout) -> None:
    release = threading.Event()

    def hang(_: Any) -> Any:
        if request_timeout is None:
            clock.ahead += 100.0  # the time limit expires
        release.wait(120.0)
        return says("score: 1")

    manager, server = judge(hang, request_timeout=request_timeout, tries=2)
    outcome = run(manager, [sample()], timeout=100.0)["s0"]
    release.set()
    assert outcome.kind is FailureKind.TIMEOUT
    assert len(server.requests) == (2 if request_timeout else 1)


@pytest.mark.parametrize(
    ("aggregate", "value"), [("mean", 3.0), ("median", 2.0), ("majority", 1.0)]
)
def test_votes_become_one_score(judge, sample, run, aggregate, value) -> None:
    texts = [f"score: {number}" for number in (1, 2, 1, 9, 2)]
    manager, server = judge(in_turn(*texts), votes=5, aggregate=aggregate, temperature=1.0)
    outcome = run(manager, [sample()])["s0"]
    assert outcome.value == pytest.approx(value)
    assert outcome.components["votes"] == 5
    assert outcome.components["vote_spread"] == pytest.approx(3.03315, abs=1e-4)
    assert len(server.requests) == 5


def test_too_few_votes_are_no_score(judge, sample, run) -> None:
    replies = ("score: 1", (401, "no", {}), "score: 3")
    manager, _ = judge(in_turn(*replies), votes=3, temperature=1.0)
    outcome = run(manager, [sample()])["s0"]
    assert outcome.kind is FailureKind.EXCEPTION
    manager, _ = judge(in_turn(*replies), votes=3, min_votes=2, temperature=1.0)
    outcome = run(manager, [sample()])["s0"]
    assert outcome.value == 2.0
    assert outcome.components["votes"] == 2


def test_all_requests_are_one_budget(judge, sample, run) -> None:
    manager, server = judge(
        in_turn((500, "broken", {}), says("score: 1", total_tokens=11)),
        votes=2,
        temperature=1.0,
        workers=2,
        tokens_per_minute=1e6,
    )
    outcomes = run(manager, [sample(f"s{i}") for i in range(6)])
    assert all(isinstance(outcome, Score) for outcome in outcomes.values())
    assert len(server.requests) == len(manager.budget._spent) == 13
    assert server.most <= 2
    assert sorted(spending.tokens for spending in manager.budget._spent)[1:] == [11.0] * 12


def test_waiting_for_the_budget_is_no_running_time(judge, sample, waited) -> None:
    manager, _ = judge("score: 1", requests_per_minute=300, window=0.4)
    # Two requests fit into each window of 0.4 s.
    assert waited(manager, [sample(f"s{i}", str(i)) for i in range(5)]) >= 0.4


@pytest.mark.parametrize(
    "template",
    [
        "{{ extra_info['absent'] }}",
        "{{ response.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.join(extra_info.absent) }}",
    ],
)
def test_a_template_that_reaches_out_or_lacks_something_gives_no_score(
    judge, sample, run, template
) -> None:
    manager, server = judge("score: 1", template="{{ response }} " + template)
    outcome = run(manager, [sample()])["s0"]
    assert outcome.kind is FailureKind.EXCEPTION
    assert "template" in outcome.message
    assert not server.requests


def test_a_question_is_asked_once_at_temperature_0_and_failures_are_not_kept(
    judge, sample, run
) -> None:
    manager, server = judge(in_turn("hm", "score: 1"), workers=1)
    assert isinstance(run(manager, [sample("a")])["a"], Failure)
    for name, text in (("b", "4"), ("c", "4"), ("d", "5")):
        assert run(manager, [sample(name, text)])[name].value == 1.0
    assert len(server.requests) == 3
