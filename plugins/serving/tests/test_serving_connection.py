"""Servers that misbehave: every running request ends with an error that describes the failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail.interfaces import FinishReason, SamplingParams
from dovetail_sdk.testing.fake_server import reply, words_of
from dovetail_serving import MEDIA_TYPE, SampleCall, SampleResult, ServerConnection
from dovetail_serving.calls import ServerCalls
from dovetail_serving.frames import unpack
from dovetail_serving.messages import calls_of, packed_error, packed_result
from dovetail_serving.testing import frame_of

GENERATE, ABORT = "/dovetail/v1/generate", "/dovetail/v1/abort"


def call(name: str = "c", new: int = 4) -> SampleCall:
    return SampleCall(call_id=name, prompt_ids=[5, 6], sampling=SamplingParams(max_new_tokens=new))


def results(fake: Any, *calls: SampleCall, then: Any = None, **options: Any) -> list[Any]:
    """Return the result or error of each call."""

    async def act() -> list[Any]:
        connection = ServerConnection(fake.url, engine="Engine", **options)
        try:
            running = ServerCalls(connection)
            work = [asyncio.create_task(running.generate(one)) for one in calls]
            if then is not None:
                await then(running, work)
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            await connection.close()

    return asyncio.run(act())


def sampled(name: str, count: int = 3) -> bytes:
    import numpy as np

    return packed_result(
        name,
        SampleResult(response_ids=np.arange(count), finish_reason=FinishReason.LENGTH),
    )


def begin(request: Any) -> Iterator[str]:
    """Begin a streamed answer, and yield the names of the calls."""
    request.send_response(200)
    request.send_header("content-type", MEDIA_TYPE)
    request.send_header("transfer-encoding", "chunked")
    request.end_headers()
    return (one.call_id for one in calls_of(unpack(request.body)))


def chunk(request: Any, data: bytes) -> None:
    request.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    request.wfile.flush()


def test_calls_of_one_moment_are_one_request_and_each_gets_its_own_result(fake: Any) -> None:
    def answer(request: Any) -> None:
        names = list(begin(request))
        for length, name in reversed(list(enumerate(names))):
            chunk(request, sampled(name, length))
        chunk(request, b"")

    fake.answers[GENERATE] = answer
    found = results(fake, *(call(f"c{i}") for i in range(20)))
    assert [len(result.response_ids) for result in found] == list(range(20))
    assert fake.asked.count(GENERATE) == 1


def test_an_answer_that_breaks_off_fails_only_what_had_not_come(fake: Any) -> None:
    def answer(request: Any) -> None:
        first, *_ = begin(request)
        chunk(request, sampled(first))
        request.close_connection = True
        request.connection.close()

    fake.answers[GENERATE] = answer
    first, second = results(fake, call("a"), call("b"))
    assert len(first.response_ids) == 3
    assert isinstance(second, RolloutError)
    assert "the connection broke" in second.message


def test_an_answer_that_ends_too_early_is_an_error(fake: Any) -> None:
    def answer(request: Any) -> None:
        first, *_ = begin(request)
        chunk(request, sampled(first))
        chunk(request, b"")

    fake.answers[GENERATE] = answer
    first, second = results(fake, call("a"), call("b"))
    assert len(first.response_ids) == 3
    assert "answer without" in second.message


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b'{"error": "out of cheese", "kind": "ValueError"}', "out of cheese"),
        (502, b"<html>bad gateway</html>", "status 502"),
        (200, b'{"detail": "something"}', "something"),
        (200, b"[]", "answered 'generate'"),
    ],
)
def test_a_refusal_is_repeated_in_the_error(fake: Any, status: int, body: bytes, said: str) -> None:
    fake.answers[GENERATE] = lambda request: reply(request, status, body)
    (found,) = results(fake, call())
    assert isinstance(found, RolloutError)
    assert said in found.message


def test_garbage_in_place_of_frames_is_an_error(fake: Any) -> None:
    fake.answers[GENERATE] = lambda request: reply(request, 200, b"x" * 99, MEDIA_TYPE)
    (found,) = results(fake, call())
    assert "not a Dovetail frame" in found.message


def test_an_error_of_one_sample_leaves_the_others(fake: Any) -> None:
    def answer(request: Any) -> None:
        first, second = begin(request)
        chunk(request, packed_error(first, RolloutError("the engine refuses it")))
        chunk(request, sampled(second))
        chunk(request, b"")

    fake.answers[GENERATE] = answer
    first, second = results(fake, call("a"), call("b"))
    assert first.message == "the engine refuses it"
    assert len(second.response_ids) == 3


def test_nobody_listens(fake: Any) -> None:
    fake.close()
    (found,) = results(fake, call())
    assert "refuses connections" in found.message


def test_a_server_whose_sockets_close_before_its_status_can_be_read_names_the_status(
    fake: Any,
) -> None:
    fake.close()
    seen: list[float] = []

    def ended() -> str | None:
        seen.append(time.monotonic())
        return "ended with status -9" if seen[-1] - seen[0] > 0.3 else None

    (found,) = results(fake, call(), ended=ended)
    assert found.message.endswith("ended with status -9")


def test_a_server_that_hangs_is_found_dead_and_stays_so(fake: Any) -> None:
    fake.answers[GENERATE] = fake.answers["/health"] = lambda _: fake.release.wait()

    async def ask_again(running: ServerCalls, work: list[Any]) -> None:
        await asyncio.wait(work)
        asked = len(fake.asked)
        with pytest.raises(RolloutError, match=r"no health check for 0\.4 s"):
            await running.generate(call("later"))
        assert len(fake.asked) == asked

    found = results(fake, call("a"), call("b"), then=ask_again, patience=0.4)
    assert ["has answered no health check" in error.message for error in found] == [True, True]
    assert found[0] is not found[1]


def test_a_slow_server_that_is_well_is_waited_for(fake: Any) -> None:
    def answer(request: Any) -> None:
        name = next(begin(request))
        while fake.asked.count("/health") < 6:  # longer than `patience`, but with health answers
            time.sleep(0.01)
        chunk(request, sampled(name))
        chunk(request, b"")

    fake.answers[GENERATE] = answer
    (found,) = results(fake, call(), patience=1.2)
    assert len(found.response_ids) == 3


def test_an_engine_that_died_says_so_once_for_all_that_run(fake: Any) -> None:
    fake.answers["/health"] = lambda request: reply(request, 503)
    fake.answers[GENERATE] = lambda _: fake.release.wait()
    found = results(fake, call("a"), call("b"), patience=2.0)
    assert all("reports that its engine has died" in error.message for error in found)


def test_the_end_of_its_process_is_the_reason(fake: Any) -> None:
    def answer(request: Any) -> None:
        list(begin(request))
        request.close_connection = True
        request.connection.close()

    fake.answers[GENERATE] = answer
    (found,) = results(
        fake,
        call(),
        ended=lambda: "ended with status 139",
        died=lambda how: RolloutError(f"it has died: {how}", hint="fix it"),
    )
    assert found.message == f"it has died: the server at {fake.url} ended with status 139"
    assert found.hint == "fix it"


def test_an_aborted_call_returns_what_it_has(fake: Any) -> None:
    import threading

    ended: dict[str, threading.Event] = {}

    def answer(request: Any) -> None:
        (name,) = begin(request)
        ended.setdefault(name, threading.Event()).wait(120)
        chunk(request, sampled(name, 2))
        chunk(request, b"")

    def abort(request: Any) -> None:
        for name in unpack(request.body).header["calls"]:
            ended.setdefault(name, threading.Event()).set()
        frame_of({})(request)

    fake.answers |= {GENERATE: answer, ABORT: abort}

    async def end_it(running: ServerCalls, work: list[Any]) -> None:
        while GENERATE not in fake.asked:
            await asyncio.sleep(0.01)
        await running.abort(["c", "one that never was"])

    (found,) = results(fake, call(), then=end_it)
    assert len(found.response_ids) == 2


def test_a_call_that_was_not_sent_yet_ends_without_a_request(fake: Any) -> None:
    async def end_it(running: ServerCalls, work: list[Any]) -> None:
        await asyncio.sleep(0)
        await running.abort(["c"])

    (found,) = results(fake, call(), then=end_it)
    assert found.finish_reason is FinishReason.ABORT
    assert len(found.response_ids) == 0
    assert fake.asked == []


def test_cancelling_a_call_ends_it_on_the_server(fake: Any) -> None:
    named: dict[str, list[str]] = {}

    def answer(request: Any) -> None:
        named["asked"] = list(begin(request))
        fake.release.wait(120)

    def abort(request: Any) -> None:
        named["ended"] = unpack(request.body).header["calls"]
        frame_of({})(request)

    fake.answers |= {GENERATE: answer, ABORT: abort}

    async def cancel(_: ServerCalls, work: list[Any]) -> None:
        while "asked" not in named:
            await asyncio.sleep(0.01)
        work[0].cancel()
        while "ended" not in named:
            await asyncio.sleep(0.01)

    (found,) = results(fake, call(), then=cancel)
    assert isinstance(found, asyncio.CancelledError)
    assert named["ended"] == named["asked"]


def read_lines(fake: Any, take: Any) -> None:
    async def act() -> None:
        connection = ServerConnection(fake.url, engine="Engine")
        try:
            await connection.lines("/v1/completions", {"prompt": [5]}, take)
        finally:
            await connection.close()

    asyncio.run(act())


def test_lines_of_a_long_answer_are_handed_over_until_no_more_are_wanted(fake: Any) -> None:
    fake.answers["/v1/completions"] = lambda request: reply(request, 200, b"a\nb\nc\n")
    whole: list[str] = []
    read_lines(fake, lambda line: whole.append(line) or True)
    assert whole == ["a", "b", "c"]
    some: list[str] = []
    read_lines(fake, lambda line: some.append(line) or line != "b")
    assert some == ["a", "b"]


def test_a_line_ends_at_a_line_feed_alone(fake: Any) -> None:
    lines = ["a\u2028b\u2029c", "", "d\x85e\x0cf\x0bg\x1ch", "i\rj"]
    body = "\n".join(lines).encode()
    for end in (b"", b"\n", b"\r\n"):
        sent = body + end
        fake.answers["/v1/completions"] = lambda request, sent=sent: reply(request, 200, sent)
        found: list[str] = []
        read_lines(fake, lambda line, found=found: found.append(line) or True)
        assert found == lines


@pytest.mark.parametrize(
    "said", [{"message": "too long", "code": 400}, {"error": "too long"}, ["too long"]]
)
def test_a_refused_json_request_is_an_error_with_the_servers_message(fake: Any, said: Any) -> None:
    fake.answers["/v1/completions"] = words_of(said, 400)
    with pytest.raises(RequestRefusedError, match=r"/v1/completions with status 400: .*too long"):
        read_lines(fake, lambda _: True)


def test_a_json_request_that_the_server_failed_on_may_be_asked_again(fake: Any) -> None:
    fake.answers["/v1/completions"] = words_of({"message": "out of memory"}, 500)
    with pytest.raises(RolloutError, match="status 500: out of memory") as failed:
        read_lines(fake, lambda _: True)
    assert type(failed.value) is RolloutError


def test_a_server_that_will_be_ended_is_known_by_its_health_while_requests_run(fake: Any) -> None:
    def health(request: Any) -> None:
        request.send_response(200)
        request.send_header("dovetail-draining", "1")
        request.send_header("content-length", "0")
        request.end_headers()

    async def act() -> bool:
        connection = ServerConnection(fake.url, engine="Engine", patience=0.2)
        try:
            assert not connection.draining
            running = asyncio.create_task(ServerCalls(connection).generate(call()))
            while not connection.draining:
                await asyncio.sleep(0.01)
            running.cancel()
            return connection.alive
        finally:
            await connection.close()

    fake.answers["/health"] = health
    fake.answers[GENERATE] = lambda request: fake.release.wait(60)
    assert asyncio.run(asyncio.wait_for(act(), 60))
