"""Http reaches the hosts of its list and no other, also by a redirect."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from dovetail.interfaces import EpisodeInfo, PluginContext, ToolCall, ToolSet
from dovetail_sdk.testing.conformance import ToolConformance
from dovetail_tools.config import HttpConfig
from dovetail_tools.http import Http


class Handler(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        if self.path == "/slow":
            time.sleep(15)
        status = (
            302
            if self.path.startswith(("/to/", "/round"))
            else 404
            if self.path == "/none"
            else 200
        )
        self.send_response(status)
        if status == 302:
            self.send_header("location", self.path.removeprefix("/to/"))
        if self.path == "/login":
            self.send_header("set-cookie", "who=ada")
        self.end_headers()
        if self.path == "/large":
            for _ in range(64):
                self.wfile.write(b"x" * 1024)
        else:
            who = self.headers.get("cookie", "nobody")
            self.wfile.write(f"{self.path} {who} {self.headers.get('x-key')}".encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(201)
        self.end_headers()
        self.wfile.write(b"got " + body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    handler = type("Own", (Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


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
