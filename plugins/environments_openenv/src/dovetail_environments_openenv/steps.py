"""Runs OpenEnv's environments. `worker.py` of dovetail-environments runs this file in an interpreter with OpenEnv, without Dovetail.

The server is called over its WebSocket, without OpenEnv's client. After a lost connection, that client would reconnect to a new session
in the middle of an episode; it also drops the reasons why an action is refused.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

_APART = 2**30
"""Distance between the seeds of training tasks and of held-out tasks."""
# uv is installed beside this interpreter. It must not take this interpreter's virtual environment for the project's.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
os.environ.pop("VIRTUAL_ENV", None)


class ActionRefused(Exception):
    """The environment refused an action; the policy is shown the reason."""


class Server:
    """A session of an OpenEnv server. If the settings name a project, this process starts the project's server first.

    Args:
        settings: the fields of an OpenEnvConfig, and the run's `seed`.

    Raises:
        RuntimeError: the server does not start, or does not answer.
        ValueError: the environment's actions lack the field that the setting `action` names.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._provider: Any = None
        self._settings, self._url = settings, (settings["url"] or "").rstrip("/")
        try:
            if settings["project"] is not None:
                self._url = self._started(settings["project"], settings["app"])
            schema = self._http("schema")["action"]
            self._socket = connect(f"ws{self._url.removeprefix('http')}/ws", max_size=None)
        except (OSError, WebSocketException, KeyError) as error:
            self.close()
            message = f"the server at {self._url} does not answer as an OpenEnv server: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error
        except BaseException:
            self.close()
            raise
        fields = schema.get("properties", {}).keys() - {"metadata"}
        needed = fields & set(schema.get("required", ())) or fields
        self._fields = ", ".join(sorted(fields))
        self._field = settings["action"] or (min(needed) if len(needed) == 1 else None)
        if self._field is not None and self._field not in fields:
            self.close()
            raise ValueError(f"the environment's actions have no field {self._field!r} (setting `action`); expected one of {self._fields}")  # fmt: skip

    def tasks(self, count: int, held_out: bool) -> list[dict[str, Any]]:
        """Return, for each task, the arguments that reset the environment to the task."""
        seed = self._settings["seed"] % _APART
        try:
            [name] = self._http("list_environments")
            splits = self._http(f"{name}/splits")
        except urllib.error.HTTPError as error:
            if error.code not in (404, 501):
                raise
            first = seed + _APART * held_out
            return [{"seed": first + number} for number in range(count)]
        train = next((split for split in splits if split["type"] == "train"), splits[0])
        others = [split for split in splits if split is not train]
        split = others[0] if held_out and others else train
        first = self._settings["tasks"] if held_out and not others else 0
        there = self._http(f"{name}/num_tasks", {"split": split["name"]})["num_tasks"]
        return [
            {"split": split["name"], "index": index, "seed": seed + index}
            for index in range(first, min(first + count, there))
        ]

    def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
        """Reset the environment to a task, and return the task's first messages."""
        shown = self._shown(self._ask("reset", task)["observation"])
        system = self._settings["instruction"]
        messages = [{"role": "system", "content": system}] if system else []
        return [*messages, {"role": "user", "content": shown}]

    def step(self, text: str) -> tuple[float | None, bool, str]:
        """Take an action, and return its reward, whether the episode is over, and the next observation.

        Args:
            text: the policy's text, which is the action.

        Raises:
            ActionRefused: the text is not an action of this environment.
        """
        if self._field is not None:
            action = {self._field: text.strip()}
        else:
            try:
                action = json.loads(text[text.index("{") : text.rindex("}") + 1])
            except ValueError:
                message = f"This is not an action. Answer with a JSON object that has the fields {self._fields}."
                raise ActionRefused(message) from None
        answer = self._ask("step", action)
        return answer["reward"], answer["done"], self._shown(answer["observation"])

    def close(self) -> None:
        """End the session, and the server if this process started it."""
        if getattr(self, "_socket", None) is not None:
            self._socket.close()
        if self._provider is not None:
            self._provider.stop()

    def _started(self, project: str, app: str) -> str:
        here, remote = Path.cwd(), project.startswith("git+")
        if not remote and not Path(project, "pyproject.toml").is_file():
            raise ValueError(f"project {project!r} has no pyproject.toml (working directory {here}); expected the folder of an OpenEnv environment, or git+URL")  # fmt: skip
        # This import takes seconds, and only a server that this process starts needs it.
        from openenv.core.containers.runtime import UVProvider

        self._provider = UVProvider(project_path=project, app=app, host="127.0.0.1")
        try:
            # Start in the project's folder as OpenEnv's images do, since `server` is imported from there.
            os.chdir(here if remote else project)
            url = str(self._provider.start())
        finally:
            os.chdir(here)
        # Wait in short rounds, since wait_for_ready checks only at its start whether the server has died. The run limits the time.
        while True:
            try:
                self._provider.wait_for_ready(timeout_s=1.0)
            except TimeoutError:
                continue
            return url

    def _http(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", data, headers)  # noqa: S310 - the config's
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return json.load(response)

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        found = answer["data"]
        if answer["type"] == "observation":
            return dict(found)
        if kind == "step" and found.get("code") == "VALIDATION_ERROR":
            reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found["errors"])  # fmt: skip
            raise ActionRefused(f"This is not an action: {reasons}. An action has the fields {self._fields}.")  # fmt: skip
        raise RuntimeError(f"the OpenEnv server refused the request {kind!r} with {found.get('code')}: {found.get('message')}")  # fmt: skip

    def _shown(self, observation: dict[str, Any]) -> str:
        name = self._settings["observation"]
        if name is not None and name not in observation:
            raise ValueError(f"the environment's observation has no field {name!r} (setting `observation`); expected one of {', '.join(observation)}")  # fmt: skip
        fields = {key: each for key, each in observation.items() if key != "metadata"}
        value = observation[name] if name else fields or observation
        if name is None and len(value) == 1:
            [value] = value.values()
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_servers: list[Server] = []
"""The server of this process; empty if there is none."""


def tasks(settings: dict[str, Any], count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return the tasks, each with its first observation."""
    server = _running(settings)
    return [{"prompt": server.reset(task), "task": task} for task in server.tasks(count, held_out)]


def episode(settings: dict[str, Any], task: dict[str, Any], model: Any) -> dict[str, Any]:
    """Run an episode of a task, and return the environment's `reward` and the reward components `parts`.

    Raises:
        RuntimeError: the server has failed, or gave no reward.
    """
    try:
        return _episode(_running(settings), settings, task, model)
    except model.Ended:
        raise
    except BaseException:
        while _servers:  # the next episode starts another server
            _servers.pop().close()
        raise


def _episode(
    server: Server, settings: dict[str, Any], task: dict[str, Any], model: Any
) -> dict[str, Any]:
    messages = server.reset(task)
    rewards: list[Any] = []
    turns = invalid = 0
    over = False
    while not over and turns != settings["steps"]:
        text = model.chat(messages)
        turns += 1
        try:
            reward, over, shown = server.step(text)
            rewards.append(reward)
        except ActionRefused as error:
            invalid += 1
            shown = str(error)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]
    counted = rewards if settings["reward"] == "sum" else rewards[-1:]
    if None in counted:  # OpenEnv's servers also write null for a number that is not finite
        raise RuntimeError(
            f"the environment returned the rewards {counted}; expected finite numbers"
        )
    total = sum(counted) if rewards else settings["at_limit"]
    return {"reward": total, "parts": {"turns": turns, "invalid": invalid}}


def _running(settings: dict[str, Any]) -> Server:
    if not _servers:
        _servers.append(Server(settings))
    return _servers[0]
