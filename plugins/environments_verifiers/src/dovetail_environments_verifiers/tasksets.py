"""Runs verifiers' tasksets. `worker.py` of dovetail-environments runs this file in an interpreter with verifiers, without Dovetail."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

_KEY = "DOVETAIL_EPISODE_KEY"
"""Environment variable with the API key of the episode."""
_RUNNER = asyncio.Runner()
# Harnesses install their requirements with uv, which is installed beside this interpreter.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def tasks(settings: dict[str, Any], count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return the taskset's first tasks, or with `held_out` the tasks after the training tasks."""
    first = settings["tasks"] if held_out else 0
    found = []
    for task in itertools.islice(_environment(settings).taskset, first, first + count):
        system = task.data.system_prompt
        prompt = task.data.prompt_text or task.data.description or task.data.name or "begin"
        messages = [{"role": "system", "content": system}] * (system is not None)
        found.append(
            {
                "prompt": [*messages, {"role": "user", "content": prompt}],
                "task": {"index": task.data.idx},
                "ground_truth": getattr(task.data, "answer", None),
            }
        )
    return found


def episode(settings: dict[str, Any], task: dict[str, Any], model: Any) -> dict[str, Any]:
    """Run the taskset's harness on a task, and return the reward and its components.

    Raises:
        RuntimeError: verifiers recorded an error.
    """
    os.environ[_KEY] = model.api_key
    return _RUNNER.run(_episode(settings, task, model))


async def _episode(settings: dict[str, Any], task: dict[str, Any], model: Any) -> dict[str, Any]:
    environment = _environment(settings)
    client = vf.EvalClientConfig(base_url=model.base_url, api_key_var=_KEY)
    context = vf.ModelContext(model=model.name, client=client)
    [chosen] = itertools.islice(environment.taskset, task["index"], task["index"] + 1)
    async with environment.serving():
        played = await environment.run_episode(chosen, context)
    for errors in (played.errors, *(trace.errors for trace in played.traces)):
        if errors:
            raise RuntimeError(
                f"the episode failed in verifiers: {errors[-1].type}: {errors[-1].message}"
            )
    parts = {"turns": float(played.num_turns)}
    for trace in played.traces:
        parts |= {name: value.value for name, value in trace.rewards.items() if value is not None}
        parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": sum(trace.reward for trace in played.traces), "parts": parts}


@cache
def _made(taskset: str, agent: str) -> Any:
    config = vf.SingleAgentEnvConfig.model_validate_json(
        f'{{"taskset": {taskset}, "agent": {agent}}}'
    )
    return vf.load_environment(config)


def _environment(settings: dict[str, Any]) -> Any:
    """Return verifiers' environment object, which combines the taskset, its harness and its runtime; it is made only once."""
    taskset = {**settings["taskset_config"], "id": settings["taskset"]}
    harness = {**settings["harness_config"], "id": settings["harness"]}
    agent = {"harness": harness, "runtime": settings["runtime"]}
    return _made(json.dumps(taskset), json.dumps(agent))
