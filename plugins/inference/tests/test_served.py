"""A server with OpenAI's API: its requests, the samples from its answers, and the comparison of its metrics with a run's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError, RequestRefusedError, RolloutError
from dovetail.interfaces import (
    Completion,
    PluginContext,
    Prompt,
    RolloutRequest,
    SamplingParams,
)
from dovetail.random_streams import SampleStream
from dovetail.telemetry import RunDirectory, append_rows
from dovetail_inference import served
from dovetail_inference.served import (
    ModelServer,
    ServedRollout,
    beside_the_run,
    check_template,
)


class Letters:
    """A tokenizer with one token for each letter."""

    eos_token_id = 0

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) for letter in text]


class Answering:
    """A server on the loopback interface that gives answers in order, and repeats the last one."""

    def __init__(self) -> None:
        self.models = ["math"]
        self.answers: list[tuple[int, Any]] = [(200, {})]
        self.asked: list[tuple[str, Any, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(200, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, body, self.headers["authorization"]))
                last = len(outer.answers) == 1
                self._say(*(outer.answers[0] if last else outer.answers.pop(0)))

            def _say(self, status: int, value: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def answering() -> Iterator[Answering]:
    made = Answering()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "FIRST_PAUSE", 0.001)


def completion(text: str, reason: str = "stop", **further: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"text": text, "finish_reason": reason, **further}]}


def sampled(answering: Answering, n: int = 1, **sampling: Any) -> list[Completion]:
    server = ModelServer.find(answering.url + "/v1/", None, None)
    rollout = ServedRollout(server, PluginContext(tokenizer=Letters()))
    request = RolloutRequest(
        request_id="r",
        prompt_ids=np.array([7, 8]),
        sampling=SamplingParams(max_new_tokens=5, **sampling),
        streams=tuple(SampleStream(seed=1, sample=number) for number in range(n)),
    )

    async def run() -> list[Completion]:
        return [each async for each in rollout.submit(request)]

    return sorted(asyncio.run(run()), key=lambda each: each.sample)


def test_a_request_says_all_that_decides_how_tokens_are_drawn(answering: Answering) -> None:
    answering.answers = [completion("ab")]
    assert len(sampled(answering, 2, temperature=0.7, top_p=0.9, stop=("x",))) == 2
    (path, one, _), (_, other, _) = answering.asked
    assert path == "/v1/completions"
    assert one.pop("seed") != other.pop("seed")
    assert one == other
    expected = {"model": "math", "prompt": [7, 8], "max_tokens": 5, "temperature": 0.7}
    assert one.items() >= (expected | {"top_p": 0.9, "top_k": -1}).items()
    # A server would take missing parameters from generation_config.json.
    assert (one["min_p"], one["repetition_penalty"], one["stop"]) == (0.0, 1.0, ["x"])


@pytest.mark.parametrize(
    ("answer", "ids", "reason"),
    [
        (completion("ab", token_ids=[4, 5, 0]), [4, 5, 0], "stop"),
        (completion("ab"), [97, 98, 0], "stop"),
        (completion("ab", "length"), [97, 98], "length"),
        (completion("", token_ids=[]), [0], "stop"),
    ],
)
def test_token_ids_are_the_servers_or_those_of_its_text(
    answering: Answering, answer: Any, ids: list[int], reason: str
) -> None:
    answering.answers = [answer]
    [found] = sampled(answering)
    assert found.response_ids.tolist() == ids
    assert found.finish_reason == reason


def test_a_busy_server_is_asked_again_and_one_that_stays_so_is_an_error(
    answering: Answering,
) -> None:
    answering.answers = [(503, "busy"), (429, "busy"), completion("a")]
    assert len(sampled(answering)) == 1
    answering.answers = [(503, "busy")]
    with pytest.raises(RolloutError, match="503"):
        sampled(answering)


@pytest.mark.parametrize("answer", [(400, "too long"), (200, {"choices": []}), (200, [])])
def test_a_request_that_is_refused_or_not_understood_is_not_sent_again(
    answering: Answering, answer: Any
) -> None:
    answering.answers = [answer]
    with pytest.raises(RequestRefusedError):
        sampled(answering)
    assert len(answering.asked) == 1


def test_a_server_is_found_with_its_model_and_key(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "secret")
    server = ModelServer.find(answering.url, None, "KEY")
    assert (server.url, server.model) == (answering.url, "math")
    assert "secret" not in repr(server)
    answering.answers = [completion("a")]
    asyncio.run(server.ask("/v1/completions", {}))
    assert answering.asked[0][2] == "Bearer secret"
    answering.models = ["math", "other"]
    assert ModelServer.find(answering.url, "other", None).model == "other"
    for model, auth_env, found in ((None, None, "math, other"), ("x", None, "but not x"), (None, "NO_KEY", "NO_KEY")):  # fmt: skip
        with pytest.raises(ConfigError, match=found):
            ModelServer.find(answering.url, model, auth_env)
    with pytest.raises(RolloutError, match="list of models"):
        ModelServer.find("http://127.0.0.1:9", None, None)


@pytest.mark.parametrize("tokens", [3, 4, None])
def test_a_chat_template_that_makes_another_number_of_tokens_is_an_error(
    answering: Answering, tokens: int | None
) -> None:
    config = config_from_mapping({"model": {"path": "m"}}).config
    prompt = Prompt(index=0, prompt_ids=np.arange(3), raw="Add.")
    tools = [{"type": "function", "function": {"name": "add"}}]
    answering.answers = [(200, {"usage": {"prompt_tokens": tokens}})]
    server = ModelServer.find(answering.url, None, None)
    if tokens == 3:
        check_template(config, server, [prompt], tools)
    else:
        with pytest.raises(ConfigError, match=rf"{tokens} tokens.* 3"):
            check_template(config, server, [prompt], tools)
    [(path, body, _)] = answering.asked
    assert path == "/v1/chat/completions"
    assert (body["messages"], body["tools"]) == ([{"role": "user", "content": "Add."}], tools)


def test_figures_are_compared_with_the_validation_after_the_same_step(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "math" / "grpo")
    figure = {"val/mean@1": 0.5, "val/mean@1/low": 0.4, "val/mean@1/high": 0.6}
    of_a_source = {"val/gsm8k/mean@1": 1.0, "val/gsm8k/mean@1/low": 1.0}
    append_rows(run.metrics, [{"step": 3, "loss": 1.0}, {"step": 3, **figure, **of_a_source}])
    for value, inside in ((0.4, True), (0.6, True), (0.39, False), (0.61, False)):
        [found] = beside_the_run(run, 3, {"val/mean@1": value})
        assert (found.name, found.inside) == ("val/mean@1", inside)
    with pytest.raises(ConfigError, match="validations after 3"):
        beside_the_run(run, 2, {"val/mean@1": 0.5})
    with pytest.raises(ConfigError, match=r"lacks.*val/mean@1"):
        beside_the_run(run, 3, {"val/mean@8": 0.5})
