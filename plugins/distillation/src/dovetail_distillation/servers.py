"""Teacher servers that the run starts: vLLM or SGLang. A process of the runtime starts each server and forwards requests to it.

The process and its server are on one machine, so that the server listens on the loopback interface only. Requests reach the process as
calls of the runtime. Requests have the form of vLLM's `/v1/completions`; for SGLang, requests and answers are converted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError, WorkerError
from dovetail.interfaces import Logger, PluginContext, TaskSpec, TaskWorker
from dovetail_distillation.config import EndpointSection
from dovetail_serving import LOOPBACK, ServerProcess, free_port

_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_LOOK_SECONDS = 0.2
_SHOWN = 2000
"""Number of characters of a server's log that an error shows."""


@attrs.define(eq=False)
class _Place:
    """The process of one server, the number of its running requests, and the lock under which it is restarted."""

    worker: TaskWorker
    running: int = 0
    again: threading.Lock = attrs.field(factory=threading.Lock)


class TeacherServers:
    """The controller's handle of teacher servers: starts them, and sends each request to the server with the fewest running requests.

    Args:
        name: the name of the endpoint, for messages.
        section: the endpoint's config; its `serve`, the settings of the servers, is not None.
        context: the context of the stage; its `runtime` starts the processes.

    Raises:
        ConfigError: the runtime starts no processes.
        PlacementError: the machines lack what the servers need.
        WorkerError: a server did not start; the message ends with the server's output.
    """

    def __init__(self, name: str, section: EndpointSection, context: PluginContext) -> None:
        serve, runtime = section.serve, context.runtime
        assert serve is not None
        if runtime is None or "task_workers" not in runtime.capabilities:
            raise without_processes(name, getattr(runtime, "name", "none"))
        setup = {
            "model": section.model,
            "engine": serve.engine,
            "accelerators": serve.accelerators,
            "arguments": dict(serve.arguments),
            "python": serve.python,
            "seconds": serve.start_timeout,
            "log": str(Path(context.run_directory or tempfile.gettempdir()) / "logs"),
            "name": name,
        }
        spec = TaskSpec(
            label=f"teacher-{name}",
            target="dovetail_distillation.servers:serve",
            setup=json.dumps(setup).encode(),
            count=serve.replicas,
            cpus=serve.cpus,
            accelerators=serve.accelerators,
            start_timeout=serve.start_timeout,
        )
        self._places = [_Place(worker) for worker in runtime.task_workers(spec)]

    async def post(self, request: Mapping[str, Any]) -> tuple[int, str]:
        """Send a request to a server, and return status and body of the answer.

        Raises:
            WorkerError: the server's process died, and has been restarted.
        """
        place = min(self._places, key=lambda place: place.running)
        place.running += 1
        try:
            asked = place.worker.call(json.dumps(request).encode())
            status, _, body = (await asyncio.wrap_future(asked)).partition(b" ")
        except WorkerError:
            await asyncio.to_thread(self._revive, place)
            raise
        finally:
            place.running -= 1
        return int(status), body.decode()

    def close(self) -> None:
        """End the servers; safe to call twice."""
        for place in self._places:
            place.worker.close()
        self._places = []

    def _revive(self, place: _Place) -> None:
        with place.again:
            if place.worker.lost is not None:
                place.worker = place.worker.again()


def described(section: EndpointSection) -> str:
    """Return a description of the servers to start: their number, the accelerators of each server, and GiB of weights per accelerator."""
    serve, directory = section.serve, Path(section.model).expanduser()
    assert serve is not None
    what = (
        f"{serve.replicas} {_TITLES[serve.engine]} server{'s' * (serve.replicas > 1)} of this run"
    )
    if serve.accelerators:
        what += f", each with {serve.accelerators} accelerator{'s' * (serve.accelerators > 1)} besides those of the pools"
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    each = f", {size / max(1, serve.accelerators) / 2**30:.3g} GiB of weights each" if size else ""
    return what + each


def without_processes(name: str, runtime: str) -> ConfigError:
    """Return the error that the servers of endpoint `name` can't be started, since the runtime starts no processes."""
    return ConfigError(
        f"the servers of endpoint {name!r} of the stage score_teacher can't be started: runtime.name={runtime} starts no server processes",
        hint="set runtime.name=ray; or configure the teacher as a role, or set the endpoint's `url` to a running server",
    )


class TeacherServer:
    """The process of one teacher server: starts it and forwards requests to it."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup, self._starting = setup, threading.Lock()
        self._start()

    def _start(self) -> None:
        setup, port = self._setup, free_port()
        self._url = f"http://{LOOPBACK}:{port}"
        self._log = Path(setup["log"]) / f"teacher-{setup['name']}-{port}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [setup["python"] or sys.executable, "-m", *_arguments(setup, port)]
        self._process = ServerProcess(command, log=self._log, environment={})
        try:
            self._wait(float(setup["seconds"]))
        except BaseException:
            self.close()
            raise

    async def call(self, payload: bytes) -> bytes:
        """Forward a request, and return the HTTP status, a space and the body of the answer.

        If the server gives no answer, the status is 503; a server that has died is restarted first.

        Raises:
            WorkerError: the server can't be restarted.
        """
        import httpx2

        try:
            async with httpx2.AsyncClient(timeout=None) as client:
                if sglang := self._setup["engine"] == "sglang":
                    payload = for_sglang(payload)
                path = "generate" if sglang else "v1/completions"
                headers = {"content-type": "application/json"}
                reply = await client.post(f"{self._url}/{path}", content=payload, headers=headers)
        except httpx2.HTTPError as error:
            await asyncio.to_thread(self._start_again)
            return f"503 {type(error).__name__}: {error}".encode()
        body = reply.content
        if sglang and reply.status_code == httpx2.codes.OK:
            body = from_sglang(body)
        return f"{reply.status_code} ".encode() + body

    def close(self) -> None:
        """End the server."""
        self._process.close()

    def _start_again(self) -> None:
        """Restart the server if it has died. If several requests failed at its death, only the first one restarts it."""
        with self._starting:
            if self._process.exit_status is not None:
                self._process.close()
                self._start()

    def _wait(self, seconds: float) -> None:
        import httpx2

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.exit_status is not None:
                raise WorkerError(self._ended(), hint=f"see the server's log; check that {_TITLES[self._setup['engine']]} is installed for the interpreter (serve.python)", lost=True)  # fmt: skip
            try:
                if httpx2.get(f"{self._url}/health").status_code == httpx2.codes.OK:
                    return
            except httpx2.HTTPError:
                pass  # the server does not listen yet
            time.sleep(_LOOK_SECONDS)
        raise WorkerError(
            f"the teacher's server did not become ready within serve.start_timeout={seconds:g} s; see its log {self._log}",
            lost=True,
        )

    def _ended(self) -> str:
        printed = self._log.read_text(errors="replace")[-_SHOWN:] if self._log.exists() else ""
        return f"the teacher's server ended with status {self._process.exit_status}; the end of its log {self._log}:\n{printed}"


def serve(given: bytes, logger: Logger) -> TeacherServer:
    """Start a teacher's server from `given`, its settings as JSON, and return the object that forwards requests to it."""
    server = TeacherServer(json.loads(given))
    logger.info("a teacher's server is ready")
    return server


def for_sglang(asked: bytes) -> bytes:
    """Convert a request for `/v1/completions` to one for SGLang's `/generate` that asks for the prompt tokens' log-probabilities."""
    request = json.loads(asked)
    top_k = request["prompt_logprobs"]
    return json.dumps(
        {
            "input_ids": request["prompt"],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
            # Only the check before the first step needs texts, and it requests no further words.
            "return_text_in_logprobs": not top_k,
        }
    ).encode()


def from_sglang(answered: bytes) -> bytes:
    """Convert an answer of SGLang's `/generate` to one of `/v1/completions`: log-probabilities, in nats, of each prompt token but the
    first, and of the most likely words at its position.
    """
    about = json.loads(answered)["meta_info"]
    own = about["input_token_logprobs"]
    best = about.get("input_top_logprobs") or [None] * len(own)
    scores = [
        {str(word): {"logprob": value, "decoded_token": text} for value, word, text in (*(top or ()), token)}
        for token, top in zip(own[1:], best[1:], strict=True)
    ]  # fmt: skip
    return json.dumps({"choices": [{"prompt_logprobs": [None, *scores]}]}).encode()


def _arguments(setup: Mapping[str, Any], port: int) -> list[str]:
    """Return the words after `python -m` that start a server of the teacher's model: the server's module and its options."""
    own = {"served_model_name": setup["model"], "host": LOOPBACK, "port": port}
    ranks = max(1, setup["accelerators"])
    if setup["engine"] == "sglang":
        here = {} if setup["accelerators"] else {"device": "cpu"}
        given = {**here, "tp_size": ranks, "skip_server_warmup": True, **setup["arguments"]}
        given |= {"model_path": setup["model"], **own}
        return ["dovetail_rollout_sglang.serve", json.dumps(given)]
    given = {"tensor_parallel_size": ranks, **setup["arguments"]}
    # Remove vLLM's limit (20) on the number of words, since a student may compare any number.
    given |= {"model": setup["model"], **own, "max_logprobs": -1}
    return ["vllm.entrypoints.openai.api_server", *_flags(given)]


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments as options of vLLM's command line."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"
