"""A scoring service on the loopback: answers as `failing_reward` does, or as it is told."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dovetail_sdk.testing.failing_reward import compute_score

Answer = Callable[[Any, dict[str, str]], tuple[int, Any]]
"""From a request's JSON and headers to status and answer: anything that JSON has, or bytes as they are."""


def score_rows(request: Any, headers: dict[str, str]) -> tuple[int, Any]:  # noqa: ARG001 - an Answer gets both
    """Score each row, and say of those that fail that they do."""
    results: list[Any] = []
    for row in request["samples"]:
        try:
            results.append(
                compute_score(
                    row["data_source"], row["solution_str"], row["ground_truth"], row["extra_info"]
                )
            )
        except ConnectionError:
            return 503, "no judge"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told, whatever it is
            results.append({"error": f"{type(error).__name__}: {error}"})
    return 200, {"results": results}


@contextlib.contextmanager
def reward_service(answer: Answer = score_rows) -> Iterator[tuple[str, list[Any]]]:
    """A service that runs as long as the context: its address, and the requests that it got."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Answer one request."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            status, value = answer(body, dict(self.headers))
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Nothing: a test's output is its own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
