"""The gateway over HTTP: calls that continue a sequence, refused calls, and calls whose clients disconnect."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from gateway_episodes import MESSAGES, config_of, post, resources, run_client, said

from dovetail.errors import DovetailError
from dovetail.interfaces import Failure
from dovetail_gateway.server import Gateway
from dovetail_sdk.testing.chat_templates import THINKING

CHAT = "/v1/chat/completions"


def chat(url: str, key: str, messages: Sequence[Any], **fields: Any) -> Any:
    status, body, _ = post(url, key, CHAT, {"model": "policy", "messages": messages, **fields})
    assert status == 200, body
    return body["choices"][0]["message"]


USER, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}


@pytest.mark.parametrize(
    "told",
    [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]},
        {"role": "assistant", "content": " one\n"},
        {"role": "assistant", "content": "one", "reasoning": "why", "refusal": None},
    ],
)  # fmt: skip
def test_a_turn_that_comes_back_in_another_form_is_the_same_turn(told: dict[str, Any]) -> None:
    def client(url: str, key: str) -> None:
        first = chat(url, key, [USER])
        assert (first["content"], first["reasoning"]) == ("one", "why")
        assert chat(url, key, [USER, told, MORE])["content"] == "two"

    drawn, _ = run_client(client, said("<think>why</think>one", "two"))
    drawn.audit()
    assert len(drawn.sample.sequences) == 1


def test_a_turn_that_the_template_writes_as_it_was_said_is_the_same_turn() -> None:
    said_ = "<think>\nwhy\n</think>\n\none"

    def client(url: str, key: str) -> None:
        chat(url, key, [USER])
        chat(url, key, [USER, {"role": "assistant", "content": said_}, MORE])

    drawn, _ = run_client(client, said(said_, "two"))
    drawn.audit()
    assert len(drawn.sample.sequences) == 1


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ([USER, {"role": "assistant", "content": "two"}, MORE], "unknown_turn"),
        ([{"role": "system", "content": "x"}, USER], "other_history"),
        ([USER], "other_history"),
    ],
)
def test_what_does_not_continue_begins_a_sequence_that_is_counted_by_its_cause(
    second: list[Any], why: str
) -> None:
    def client(url: str, key: str) -> None:
        chat(url, key, [USER])
        chat(url, key, second)

    drawn, _ = run_client(client, said("one"))
    drawn.audit()
    assert len(drawn.sample.sequences) == 2
    assert drawn.counts()[f"further_sequences/{why}"] == 1


def test_other_tools_begin_another_sequence_whose_prompt_describes_them() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}

    def client(url: str, key: str) -> None:
        first = chat(url, key, [USER])
        chat(url, key, [USER, first, MORE], tools=[tool])

    seen: list[str] = []
    drawn, _ = run_client(client, lambda _, prompt: seen.append(prompt) or "one")
    drawn.audit()
    assert ["look_up" in prompt for prompt in seen] == [False, True]


def test_a_call_that_cannot_be_read_is_text_that_comes_back_as_such() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    broken = "<tool_call>{broken</tool_call>"

    def client(url: str, key: str) -> None:
        first = chat(url, key, [USER], tools=[tool])
        assert first["content"] == broken
        chat(url, key, [USER, first, MORE], tools=[tool])

    drawn, _ = run_client(client, said(broken, "two"))
    drawn.audit()
    assert len(drawn.sample.sequences) == 1


def test_calls_are_text_where_the_request_has_no_tools() -> None:
    def client(url: str, key: str) -> Any:
        return chat(url, key, [USER])

    _, message = run_client(
        client, said('<think>so</think><tool_call>{"name": "f", "arguments": {}}</tool_call>')
    )
    assert "tool_calls" not in message
    assert message["content"].startswith("<tool_call>")


@pytest.mark.parametrize(("on_history_change", "sequences"), [("keep", 1), ("fork", 2)])
def test_a_template_that_changes_earlier_turns_keeps_one_sequence_unless_it_is_to_fork(
    on_history_change: str, sequences: int
) -> None:
    def client(url: str, key: str) -> None:
        first = chat(url, key, [USER])
        chat(url, key, [USER, first, MORE])

    turns = said("<think>why</think>one", "two")
    config = config_of(on_history_change=on_history_change)
    drawn, _ = run_client(client, turns, config=config, template=THINKING)
    drawn.audit()
    assert len(drawn.sample.sequences) == sequences


def test_half_of_a_surrogate_pair_in_a_request_is_answered() -> None:
    def client(url: str, key: str) -> Any:
        body = {
            "model": "policy",
            "input": "a\ud800b",
            "instructions": "\udc00",
            "metadata": {"x": "\ud800"},
        }
        return post(url, key, "/v1/responses", body)

    drawn, (status, body, _) = run_client(client, said("one"))
    drawn.audit()
    assert (status, body["metadata"]) == (200, {"x": "\ud800"})


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "says"),
    [
        (CHAT, b"{", {}, 400, "not JSON"),
        (CHAT, b"[" * 3900, {}, 400, "not JSON"),
        (CHAT, [], {}, 400, "not a JSON object"),
        (CHAT, {"model": "policy", "messages": ["x" * 5000]}, {}, 413, "max_request_bytes"),
        (CHAT, {"model": "policy", "messages": [{"role": "user", "content": 3}]}, {}, 400, "messages[0].content is 3"),
        (CHAT, {"model": 3, "messages": list(MESSAGES)}, {}, 400, "model is 3"),
        (CHAT, {"model": "policy", "messages": list(MESSAGES)}, {"authorization": "Bearer no"}, 401, "no running episode"),
        ("/v1/embeddings", {}, {}, 404, "/v1/embeddings is not supported"),
        ("/v1/models", {}, {}, 405, "/v1/models is not supported"),
        ("/v1/responses", {"model": "policy", "input": "x", "previous_response_id": "resp_1"}, {}, 404, "resp_1"),
        ("/v1/responses", {"model": "policy", "input": [{"type": "computer_call"}]}, {}, 400, "computer_call"),
        ("/v1/messages", {"model": "policy", "messages": list(MESSAGES)}, {}, 400, "max_tokens is null"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_and_the_episode_goes_on(
    path: str, body: Any, headers: dict[str, str], status: int, says: str
) -> None:
    def client(url: str, key: str) -> Any:
        found = post(url, key, path, body, **headers)
        chat(url, key, [USER])
        return found

    drawn, (found, error, sent) = run_client(
        client, said("one"), config=config_of(max_request_bytes=4000)
    )
    assert (found, sent["x-should-retry"]) == (status, "false")
    assert says in error["error"]["message"]
    assert not isinstance(drawn.sample.outcome, Failure)
    counted = sum(n for name, n in drawn.counts().items() if name.startswith("refused_calls/"))
    assert counted == (status not in (401, 405) and "embeddings" not in path)


def test_a_call_whose_client_hangs_up_is_ended_and_can_be_asked_again_in_its_sequence() -> None:
    def client(url: str, key: str) -> Any:
        first = chat(url, key, [USER])
        host, _, port = url.removeprefix("http://").partition(":")
        body = json.dumps({"model": "policy", "messages": [USER, first, MORE]}).encode()
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            time.sleep(0.2)
        time.sleep(0.2)
        return chat(url, key, [USER, first, MORE])

    drawn, message = run_client(client, said("one", "two"), delay=0.6)
    assert message["content"] == "two"
    drawn.audit()
    assert len(drawn.sample.sequences) == 1
    assert [turn.text for turn in drawn.sample.trajectory.turns] == ["one", "two"]


def test_what_a_call_asks_of_sampling_is_counted_and_not_applied() -> None:
    def client(url: str, key: str) -> Any:
        return chat(
            url,
            key,
            [USER],
            temperature=0,
            seed=3,
            response_format={"type": "json_object"},
            tool_choice="required",
        )

    drawn, _ = run_client(client, said("one"))
    counts = drawn.counts()
    assert {name for name in counts if name.startswith("unapplied/")} == {
        "unapplied/temperature", "unapplied/seed", "unapplied/response_format", "unapplied/tool_choice",
    }  # fmt: skip


def test_a_stream_is_made_of_events_and_ends_as_the_api_says() -> None:
    def client(url: str, key: str) -> Any:
        body = {
            "model": "policy",
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return post(url, key, CHAT, body)

    _, (status, text, headers) = run_client(client, said("one"))
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "one"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_a_gateway_listens_on_the_loopback_alone_and_leaves_nothing_behind() -> None:
    before = resources()
    gateway = Gateway(config_of())
    port = int(gateway.url.rpartition(":")[2])
    with pytest.raises(DovetailError, match="can't listen"):
        Gateway(config_of(port=port))
    gateway.close()
    gateway.close()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    assert resources() == before
    assert not [t for t in threading.enumerate() if t.name == "dovetail-gateway"]
