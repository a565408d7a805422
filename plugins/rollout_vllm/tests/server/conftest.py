"""A server that answers as a test says, and what rollouts on servers are made of."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.sections import ModelSection
from dovetail.interfaces.plugin import PluginContext
from dovetail_rollout_vllm.server_wire import MEDIA_TYPE, pack
from dovetail_sdk.testing.tiny import tiny_model, tiny_tokenizer

Answer = Callable[[BaseHTTPRequestHandler], None]


class FakeServer:
    """An HTTP server on the loopback interface whose answers are set by path; others are 404.

    Attributes:
        url: where it is.
        asked: the paths that were asked for, in order.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {"/health": lambda request: reply(request, 200)}
        self.asked: list[str] = []
        self.release = threading.Event()
        """Set at the end: handlers that hang wait for it."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                length = int(self.headers.get("content-length", 0))
                self.body = self.rfile.read(length)
                outer.answers.get(self.path, lambda request: reply(request, 404))(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


def reply(
    request: Any, status: int, body: bytes = b"", media_type: str = "application/json"
) -> None:
    """A whole answer."""
    request.send_response(status)
    request.send_header("content-type", media_type)
    request.send_header("content-length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def frame(header: dict[str, Any]) -> Answer:
    """Answers with a frame."""
    return lambda request: reply(request, 200, pack(header), MEDIA_TYPE)


def words(value: Any, status: int = 200) -> Answer:
    """Answers with JSON."""
    return lambda request: reply(request, status, json.dumps(value).encode())


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def answers() -> Any:
    """Makes answers of a fake server: `answers.frame(header)`, `answers.words(json)`, `answers.reply(request, …)`."""

    class Answers:
        frame = staticmethod(frame)
        words = staticmethod(words)
        reply = staticmethod(reply)

    return Answers


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with opinions, of a head size that vLLM's attention on CPUs has."""
    import torch

    directory = tmp_path_factory.mktemp("served")
    tokenizer = tiny_tokenizer(directory, vocab_size=300)
    model = tiny_model(
        directory, tokenizer, hidden_size=64, intermediate_size=64, heads=2, kv_heads=2
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(5)))
    model.save_pretrained(str(directory))
    return directory


@pytest.fixture
def context(served_model: Path, tmp_path: Path) -> PluginContext:
    """Of replica 0 of a run."""
    model = ModelSection(path=str(served_model), dtype="float32")
    return PluginContext(model=model, run_directory=tmp_path)
