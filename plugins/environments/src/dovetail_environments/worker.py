"""Runs an environment's file in the interpreter that the environment needs, with the standard library only: `python worker.py FILE`.

Standard input has a request per line, as JSON; each is answered by a line of JSON on standard output. The file has two functions:

- `tasks(settings, count, held_out)` returns a list of mappings: `prompt` (a text, or messages), `task` (JSON, passed to `episode`),
  `ground_truth`.
- `episode(settings, task, model)` returns the reward, or a mapping with `reward` and `parts`. `model.chat(messages)` returns the policy's
  answer; `model.base_url`, `model.api_key` and `model.name` are for clients of OpenAI's API.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import queue
import signal
import sys
import threading
import traceback
import urllib.error
import urllib.request
from typing import Any

PROTOCOL = 1


class EpisodeEnded(Exception):
    """The episode has no turns or tokens left, so the policy answers no further call.

    The reward is `at_limit`, unless `episode` catches this error.
    """


class Model:
    """A client of the policy for one episode.

    Args:
        given: the mapping with `base_url`, `api_key` and `name`.
    """

    Ended = EpisodeEnded
    """The exception that `chat` raises at a limit: `except model.Ended:`."""

    def __init__(self, given: dict[str, str]) -> None:
        self.base_url, self.api_key = given["base_url"], given["api_key"]
        self.name = given["name"]
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def chat(self, messages: list[dict[str, Any]], **request: Any) -> str:
        """Send messages to the policy and return the content of its answer.

        Args:
            messages: messages with role and content, including those of earlier calls and answers.
            request: further fields of the call, such as `max_tokens`.

        Raises:
            EpisodeEnded: a limit of the episode is reached.
            RuntimeError: the gateway refused the call for another reason.
        """
        body = json.dumps({"model": self.name, "messages": messages, **request}).encode()
        headers = {"authorization": f"Bearer {self.api_key}", "content-type": "application/json"}
        call = urllib.request.Request(f"{self.base_url}/chat/completions", body, headers)  # noqa: S310 - the gateway's
        try:
            with self._open(call) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            refusal = json.loads(error.read() or b"{}").get("error", {})
            message = str(refusal.get("message", error))
            if refusal.get("code") in ("episode_ended", "context_length_exceeded"):
                raise EpisodeEnded(message) from None
            raise RuntimeError(message) from None
        return answer["choices"][0]["message"]["content"] or ""


def main(file: str) -> None:
    """Answer the run's requests with the functions of a file until standard input ends; then end this process and its children."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # keep the environment's prints out of the answers
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    settings: dict[str, Any] = {}
    module: Any = None
    while True:
        asked = waiting.get()
        try:
            if asked["do"] == "start":
                settings = asked["settings"]
                packages = {name: _version(name) for name in asked["packages"]}
                answer = {"protocol": PROTOCOL, "python": platform.python_version(), "packages": packages}  # fmt: skip
            else:
                module = module or _loaded(file)
                answer = _answer(module, settings, asked)
        except EpisodeEnded as error:
            answer = {"error": f"EpisodeEnded: {error}"}
        except BaseException as error:  # noqa: BLE001 - also what would end this process
            traceback.print_exc()
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"  # noqa: PTH119
            answer = {"error": f"{type(error).__name__}: {error} ({where})"}
        try:
            line = json.dumps(answer)
        except (TypeError, ValueError) as error:
            line = json.dumps({"error": f"the returned value can't be written as JSON: {error}"})
        answers.write(line + "\n")


def _answer(module: Any, settings: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "tasks":
        return {"tasks": list(module.tasks(settings, asked["count"], asked["held_out"]))}
    found = module.episode(settings, asked["task"], Model(asked["model"]))
    return dict(found) if isinstance(found, dict) else {"reward": found}


def _read(requests: Any, waiting: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in requests:
        waiting.put(json.loads(line))
    # True if the run began this session, for this process or for `uv run` above it.
    if os.getpgrp() == os.getsid(0):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _loaded(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("environment", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
