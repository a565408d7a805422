"""Http reaches the hosts of its list and no other, also by a redirect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall, ToolSet
from dovetail_sdk.testing.conformance import ToolConformance
from dovetail_sdk.testing.fake_server import FakeServer, reply
from dovetail_tools.config import HttpConfig
from dovetail_tools.http import Http


def answer(request: Any) -> None:
    """Echoes what was asked, with the redirects, cookies and sizes that paths name."""
    if request.command == "POST":
        return reply(request, 201, b"got " + request.body)
    if request.path == "/slow":
        time.sleep(15)
    if request.path.startswith(("/to/", "/round")):
        return reply(request, 302, headers={"location": request.path.removeprefix("/to/")})
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
            ("http", {"url": "http://127.0.0.1:1/"}, "may not be asked"),
            ("http", {"url": "https://allowed.test/"}, "may not be asked"),
            ("http", {"url": "https://x.allowed.test.evil.test/"}, "may not be asked"),
            ("http", {"url": f"http://{address}@evil.test/"}, "may not be asked"),
            ("http", {"url": "file:///etc/passwd"}, "may not be asked"),
            ("http", {"url": f"http://{address}/to/http://evil.test/"}, "evil.test may not"),
            ("http", {"url": f"http://{address}/to/file:///etc/passwd"}, ""),
            ("http", {"url": f"http://{address}/round"}, "more than 5 redirects"),
            ("http", {"url": "no address"}, ""),
            ("http", {"url": "http://gone.allowed.test/"}, "there is no host"),
            ("http", {"url": f"http://{address}/", "method": "POST"}, "allowed are GET"),
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


def test_a_host_that_is_down_is_a_failure_and_not_the_policys_mistake():
    with pytest.raises(httpx2.ConnectError):
        called("127.0.0.1:1", "http://127.0.0.1:1/")
