"""A user simulated by a second model. `worker.py` runs this file, which uses the standard library only."""

from __future__ import annotations

import itertools
import json
import os
import re
from typing import Any

_VERDICT = re.compile(r"\[(un)?satisfied\]", re.IGNORECASE)


def tasks(settings: dict[str, Any], count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return up to `count` tasks, one per line of the file.

    Training tasks begin at the first line, held-out tasks after the `tasks` lines that the settings reserve for training.

    Raises:
        ValueError: a line is not a JSON object, or lacks `opening` or `user`.
    """
    first, found = settings["tasks"] if held_out else 0, []
    with open(settings["file"], encoding="utf-8") as file:  # noqa: PTH123
        for number, line in itertools.islice(enumerate(file, 1), first, first + count):
            task = json.loads(line)
            lacking = [key for key in ("opening", "user") if not task.get(key)]
            if lacking:
                raise ValueError(f"file {settings['file']}, line {number} lacks the key(s) {', '.join(lacking)}")  # fmt: skip
            found.append({"prompt": _begin(task), "task": task, "ground_truth": task.get("answer")})
    return found


def episode(settings: dict[str, Any], task: dict[str, Any], model: Any) -> dict[str, Any]:
    """Let policy and user talk until the user is satisfied or not, or the limit of turns is reached.

    Return `reward` and its components `parts`.

    Raises:
        RuntimeError: the user's model does not answer.
    """
    key = os.environ.get(settings["auth_env"] or "", "")
    user = type(model)({"base_url": settings["url"], "api_key": key, "name": settings["model"]})
    messages = _begin(task)
    theirs = [
        {"role": "system", "content": f"{task['user']}\n\n{settings['instruction']}"},
        {"role": "assistant", "content": task["opening"]},
    ]
    turns, verdict, said = 0, None, ""
    while verdict is None and turns < settings["turns"]:
        said = model.chat(messages)
        turns += 1
        theirs.append({"role": "user", "content": said})
        reply = _reply(user, theirs, settings)
        theirs.append({"role": "assistant", "content": reply})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
        verdict = _VERDICT.search(reply)
    satisfied = float(verdict is not None and verdict[1] is None)
    right = satisfied if task.get("answer") is None else float(str(task["answer"]) in said)
    return {"reward": right, "parts": {"satisfied": satisfied, "turns": turns}}


def _begin(task: dict[str, Any]) -> list[dict[str, str]]:
    system = task.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": task["opening"]}]


def _reply(user: Any, messages: list[dict[str, str]], settings: dict[str, Any]) -> str:
    try:
        reply = str(user.chat(messages, **settings["extra_body"]))
    except Exception as error:  # also EpisodeEnded: the end of the user's context does not end the policy's episode
        message = f"the user's model at {settings['url']} failed: {type(error).__name__}: {error}"
        raise RuntimeError(message) from error
    if not reply.strip():
        raise RuntimeError(
            f"the user's model at {settings['url']} returned an empty answer; expected a message"
        )
    return reply
