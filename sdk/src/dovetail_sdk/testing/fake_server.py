"""FakeServer: an HTTP server for tests, with a function of the test for each path."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = Callable[[BaseHTTPRequestHandler], None]


class FakeServer:
    """A context manager that runs an HTTP server on the loopback interface; a test sets its answers.

    Attributes:
        answers: path → the function that answers a request for it, for example by `reply`. The path `*` stands for all paths that are
            not listed; without it they get status 404.
        url: the server's address.
        asked: the requested paths, in order.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {"/health": lambda request: reply(request, 200)}
        self.asked: list[str] = []
        self.release = threading.Event()
        """An event that `close` sets. An answer that is to hang waits for this event, so that it ends with the server."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                length = int(self.headers.get("content-length", 0))
                self.body = self.rfile.read(length)
                answer = outer.answers.get(self.path, outer.answers.get("*"))
                if answer is None:
                    reply(self, 404)
                else:
                    answer(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the server and its hanging requests."""
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


def reply(
    request: Any,
    status: int,
    body: bytes = b"",
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a complete HTTP response to a request."""
    request.send_response(status)
    sizes = {"content-type": media_type, "content-length": str(len(body))}
    for name, value in {**sizes, **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


def words_of(value: object, status: int = 200) -> Answer:
    """Return an answer that sends `value` as JSON with this status."""
    return lambda request: reply(request, status, json.dumps(value).encode())
