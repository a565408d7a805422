"""ServedHf: the engine `hf` behind Dovetail's routes on a server of its own, which runs in a thread or as `python served_hf.py MODEL`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import PluginContext, RolloutRequest
from dovetail.metrics import Metric
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection
from dovetail_rollout_hf.config import HfRolloutConfig
from dovetail_rollout_hf.rollout import HfRollout
from dovetail_serving import (
    DESCRIBE,
    PROTOCOL,
    Backend,
    Frame,
    Host,
    OwnServer,
    Routes,
    SampleCall,
    SampleResult,
    ServerBackend,
    ServerConnection,
    ServingRollout,
    ServingSection,
    answers_of,
    end_from,
    manifest_from,
    model_problems,
    outcome_of,
    refuse_problems,
    shape_of,
)

TOKEN = "DOVETAIL_SERVED_HF_TOKEN"


@attrs.frozen(kw_only=True)
class ServedHfConfig(ServingSection):
    """Servers are joined, and none is started."""


class ServedHfBackend(ServerBackend):
    """One server."""

    engine = "hf"
    token_variable = TOKEN

    def start_server(self, token: str) -> OwnServer:
        raise RolloutError("rollout.urls names no server")

    async def join(self, connection: ServerConnection) -> None:
        await answers_of(connection, DESCRIBE, token_variable=TOKEN, hint="start served_hf.py")
        found = (await connection.ask("describe")).header
        problems = model_problems(found, self.context)
        refuse_problems(problems, engine="hf", url=connection.url, hint="give it the run's model")

    def metrics_from(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        return {}


class ServedHf(ServingRollout):
    """A replica on such a server."""

    name = "served_hf"
    api = ">=1.0,<2"
    engine = "hf"
    capabilities = frozenset({"logprobs", "scores"})
    Config = ServedHfConfig

    def make_backend(self) -> Backend:
        return ServedHfBackend(self.config, self.context)


class HfHost(Host):
    """The engine in the server's process."""

    def __init__(self, engine: Any, delay: float) -> None:
        self._engine, self._delay = engine, delay
        self._calls = itertools.count()

    async def generate(self, call: SampleCall) -> SampleResult:
        await asyncio.sleep(self._delay)
        request = RolloutRequest(
            request_id=call.call_id,
            prompt_ids=np.array(call.prompt_ids, np.int64),
            sampling=call.sampling,
            streams=(SampleStream(seed=1, prompt=next(self._calls)),),
        )
        (found,) = [completion async for completion in self._engine.submit(request)]
        fields = ("response_ids", "finish_reason", "log_probs", "raw_log_probs")
        return SampleResult(**{name: getattr(found, name) for name in fields})

    async def describe(self, _: Frame) -> Frame:
        config = self._engine._model.config
        header = {
            "protocol": PROTOCOL,
            "model": config.name_or_path,
            "architectures": list(config.architectures),
            "shape": shape_of(config),
        }
        return Frame(header=header)

    async def abort(self, frame: Frame) -> Frame:
        await self._engine.abort(frame.header["calls"])
        return Frame(header={})

    async def score(self, frame: Frame) -> Frame:
        scores = await self._engine.score([array.astype(np.int64) for array in frame.arrays])
        return Frame(header={}, arrays=tuple(scores))

    async def reset_cache(self, _: Frame) -> Frame:
        return Frame(header={})

    async def connect(self, frame: Frame) -> Frame:
        info = frame.header["info"]
        self._end = end_from(info["transport"], info["context"], "cpu")
        self._engine._receiver = self._end.receiver
        return Frame(header=attrs.asdict(outcome_of(lambda: None)))

    async def load(self, frame: Frame) -> Frame:
        manifest = manifest_from(frame.header["manifest"])

        def load() -> None:
            with self._end.taking(manifest):
                self._engine.receive_weights(manifest.version, manifest)

        return Frame(header=attrs.asdict(await asyncio.to_thread(outcome_of, load)))

    async def sleep(self, frame: Frame) -> Frame:
        raise NotImplementedError

    async def wake(self, frame: Frame) -> Frame:
        raise NotImplementedError

    async def metrics(self, _: Frame) -> Frame:
        return Frame(header={})


class HfServer:
    """A server on the loopback interface, on a free port: `run` serves until `end`. Each response begins after a delay, in seconds."""

    def __init__(self, model: str, delay: float = 0.0) -> None:
        import uvicorn

        class HfRoutes(Routes):
            token_variable = TOKEN

            def make_host(self, scope: Any) -> Host:
                return HfHost(engine, delay)

        context = PluginContext(seed=1, role="rollout", model=ModelSection(path=model, dtype="float32"))  # fmt: skip
        self.engine = engine = HfRollout(HfRolloutConfig(name="hf"), context)
        engine.start()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(HfRoutes(self._own), log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        self._server.run(sockets=[self._socket])

    def begin(self) -> None:
        """Serve in a thread."""
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End at once, whatever runs."""
        self._server.force_exit = self._server.should_exit = True

    def close(self) -> None:
        self.end()
        self._thread.join(60)
        self.engine.close()

    def digest(self) -> str:
        return digest_of(self.engine._model.state_dict())

    async def _own(self, scope: Any, receive: Any, send: Any) -> None:
        """What the server answers beside Dovetail's paths: `/health`, `/digest`, and `/die`."""
        body = self.digest() if scope["path"] == "/digest" else ""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body.encode()})
        if scope["path"] == "/die" and threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGKILL)
        elif scope["path"] == "/die":
            self.end()


def digest_of(weights: Mapping[str, Any]) -> str:
    """SHA-256 of tensors; the head, which is the embedding's, is left out."""
    found = hashlib.sha256()
    for name in sorted(weights.keys() - {"lm_head.weight"}):
        found.update(name.encode() + np.asarray(weights[name].detach()).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    server = HfServer(sys.argv[1], float(sys.argv[3]))
    Path(sys.argv[2]).write_text(server.url)
    server.run()
