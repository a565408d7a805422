"""Http reaches only the hosts of its list, also by redirects."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from dovetail.errors import ToolError
from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall
from dovetail_agents import ToolSet
from dovetail_sdk.testing.conformance import ToolConformance
from dovetail_sdk.testing.fake_server import FakeServer, reply
from dovetail_tools.config import HttpConfig
from dovetail_tools.http import Http


def answer(request: Any) -> None:
    """Answer a request with an echo, with the redirects, cookies and sizes that the path names."""
    if request.command == "POST" and not request.path.startswith("/status/"):
        return reply(request, 201, b"got " + request.body)
    if request.path == "/slow":
        time.sleep(15)
    if request.path.startswith(("/to/", "/round")):
        return reply(request, 302, headers={"location": request.path.removeprefix("/to/")})
    if request.path.startswith("/status/"):
        _, _, status, *after = request.path.split("/")
        return reply(request, int(status), headers={"retry-after": after[0]} if after else {})
    if request.path == "/charset":
        return reply(request, 200, b"\xc3\xb6", media_type="text/plain; charset=no-such")
    if request.path == "/large":
        return reply(request, 200, b"x" * 65536)
    who, key = (request.headers.get(name) for name in ("cookie", "x-key"))
    said = f"{request.path} {who or 'nobody'} {key}".encode()
    cookies = {"set-cookie": "who=ada"} if request.path == "/login" else {}
    return reply(request, 404 if request.path == "/none" else 200, said, headers=cookies)


@pytest.fixture
def address() -> Iterator[str]:
    with FakeServer() as server:
        server.answers["*"] = answer
        yield server.url.removeprefix("http://")


def called(address: str, *urls: str, config: HttpConfig | None = None, **arguments: str) -> str:
    tool = Http(config or HttpConfig(name="http", hosts=(address,)), PluginContext())
    tool.start()

    async def run() -> str:
        async with ToolSet([tool]).open(EpisodeInfo(sample_id="s")) as tools:
            for url in urls:
                call = ToolCall(id="c", name="http", arguments={"url": url, **arguments})
                result = await tools.call(call)
            return str(result.content)

    return asyncio.run(run())


class TestHttp(ToolConformance):
    plugin = Http

    @pytest.fixture(autouse=True)
    def _server(self, address: str) -> None:
        cls = type(self)
        cls.config = HttpConfig(name="http", hosts=(address, "*.allowed.test"))
        cls.calls = (
            ("http", {"url": f"http://{address}/a"}, "200 OK\n/a nobody"),
            ("http", {"url": f"http://{address}/none"}, "404 Not Found"),
            ("http", {"url": f"http://{address}/to/http://{address}/b"}, "/b"),
        )
        cls.refused = (
            ("http", {"url": "http://127.0.0.1:1/"}, "is not allowed"),
            ("http", {"url": "https://allowed.test/"}, "is not allowed"),
            ("http", {"url": "https://x.allowed.test.evil.test/"}, "is not allowed"),
            ("http", {"url": f"http://{address}@evil.test/"}, "is not allowed"),
            ("http", {"url": "file:///etc/passwd"}, "is not allowed"),
            ("http", {"url": f"http://{address}/to/http://evil.test/"}, "evil.test is not allowed"),
            ("http", {"url": f"http://{address}/to/file:///etc/passwd"}, ""),
            ("http", {"url": f"http://{address}/round"}, "more than 5 times"),
            ("http", {"url": "no address"}, ""),
            ("http", {"url": "http://gone.allowed.test/"}, "does not exist"),
            ("http", {"url": f"http://{address}/", "method": "POST"}, "expected one of GET"),
        )
        cls.hanging = ("http", {"url": f"http://{address}/slow"})


def test_cookies_belong_to_an_episode_and_the_key_is_sent(address):
    url = f"http://{address}"
    config = HttpConfig(name="http", hosts=(address,), headers={"x-key": "secret"})
    assert called(address, f"{url}/login", f"{url}/x", config=config).endswith("/x who=ada secret")
    assert called(address, f"{url}/x").endswith("/x nobody None")
    assert "secret" not in repr(config)


def test_post_sends_a_body_where_it_is_allowed(address):
    config = HttpConfig(name="http", hosts=("127.0.0.1:*",), methods=("GET", "POST"))
    sent = called(address, f"http://{address}/", config=config, method="POST", body='{"a": 1}')
    assert sent == '201 Created\ngot {"a": 1}'


def test_a_large_answer_is_cut(address):
    config = HttpConfig(name="http", hosts=(address,), max_kb=2)
    text = called(address, f"http://{address}/large", config=config)
    assert text.endswith("(cut after 2 KiB)")
    assert text.count("x") == 2048


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("dovetail_tools.http.FIRST_PAUSE", 0.01)


def asked(server: FakeServer, path: str, **arguments: str) -> str:
    host = server.url.removeprefix("http://")
    config = HttpConfig(name="http", hosts=(host,), methods=("GET", "POST"))
    return called(host, f"{server.url}{path}", config=config, **arguments)


@pytest.mark.parametrize(
    ("status", "method", "tries"),
    [
        *((429, "GET", 3), (502, "GET", 3), (503, "GET", 3), (504, "GET", 3), (500, "GET", 1)),
        *((429, "POST", 3), (503, "POST", 3), (502, "POST", 1), (501, "GET", 1), ("503/100", "GET", 1)),
    ],
)  # fmt: skip
def test_a_host_that_is_busy_or_fails_is_a_failure_after_further_tries(status, method, tries):
    with FakeServer() as server:
        server.answers["*"] = answer
        with pytest.raises(httpx2.HTTPStatusError, match=f"answered {str(status)[:3]}"):
            asked(server, f"/status/{status}", method=method)
        assert len(server.asked) == tries


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 414, 422])
def test_a_request_that_the_host_refuses_is_shown(status):
    with FakeServer() as server:
        server.answers["*"] = answer
        assert asked(server, f"/status/{status}").startswith(str(status))
        assert len(server.asked) == 1


def test_a_host_that_is_up_again_is_shown_once_the_pause_that_it_asked_for_is_over():
    def busy_at_first(request: Any) -> None:
        server.answers["*"] = answer
        reply(request, 503, headers={"retry-after": "1"})

    with FakeServer() as server:
        server.answers["*"] = busy_at_first
        began = time.monotonic()
        assert asked(server, "/again").startswith("200")
        assert time.monotonic() - began >= 1.0


def test_a_connection_that_is_reset_is_tried_again_but_for_a_post():
    def cut(request: Any) -> None:
        request.connection.shutdown(socket.SHUT_RDWR)
        request.close_connection = True

    for method, tries in (("GET", 3), ("POST", 1)):
        with FakeServer() as server:
            server.answers["*"] = cut
            with pytest.raises(httpx2.TransportError):
                asked(server, "/", method=method)
            assert len(server.asked) == tries


def test_a_charset_that_there_is_not_and_a_url_without_end_fail_nothing():
    with FakeServer() as server:
        server.answers["*"] = answer
        assert asked(server, "/charset").endswith("ö")
        with pytest.raises(ToolError, match="8000 at most"):
            asked(server, "/" + "x" * 1_000_000)


@pytest.mark.parametrize("url", ["http://gone.test/", "http://gone.test:81/"])
def test_a_host_of_the_config_without_an_address_is_no_mistake_of_the_policy(url):
    config = HttpConfig(name="http", hosts=("gone.test", "gone.test:81", "*.gone.test"), retries=0)
    with pytest.raises(httpx2.ConnectError):
        called("", url, config=config)
    for made_up in ("a.gone.test", "*.gone.test"):
        with pytest.raises(ToolError, match=re.escape(made_up)):
            called("", f"http://{made_up}/", config=config)


def test_a_host_that_is_down_is_a_failure_and_not_the_policys_mistake():
    with pytest.raises(httpx2.ConnectError):
        called("127.0.0.1:1", "http://127.0.0.1:1/")
