"""A preflight rule: settings of `program` that the rest of the config does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces import Finding
from dovetail_gateway.config import ProgramConfig


def program_unfit(config: Any, plan: Any) -> Iterator[Finding]:
    """Warn if the agent loop `program` has `score: output` or `exit_status`, but no reward function is `episode`, which reads these scores.

    Report an error if its `placement` needs processes that the runtime can't start.
    """
    loop, reward = config.rollout.agent_loop, config.reward
    if not isinstance(loop, ProgramConfig):
        return
    functions = filter(None, (reward.function, *reward.functions.values()))
    if loop.score != "reward" and not any(f.path or f.name == "episode" for f in functions):
        yield Finding.warning(
            f"rollout.agent_loop.score = {loop.score} has no effect: no reward function reads the program's score",
            hint="set reward.function=episode, or rollout.agent_loop.score=reward",
        )
    runtime = plan and plan.facts.plugins["runtime"].cls
    if loop.placement and runtime and "task_workers" not in runtime.capabilities:
        yield Finding.error(
            f"rollout.agent_loop.placement runs programs in worker processes of the runtime, but runtime.name = {config.runtime.name} has none",
            hint="set runtime.name=ray, or leave rollout.agent_loop.placement out",
        )
