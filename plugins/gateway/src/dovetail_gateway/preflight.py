"""A preflight rule: a program scores itself, and the reward function does not read that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces import Finding
from dovetail_gateway.config import ProgramConfig


def program_unfit(config: Any, plan: Any) -> Iterator[Finding]:
    """`program` gives rewards by `score: output` or `exit_status`, and no reward function is `episode`, which reads them, or one of a file."""
    loop, reward = config.rollout.agent_loop, config.reward
    given = [f for f in (reward.function, *reward.functions.values()) if f is not None]
    reads = any(f.path is not None or f.name == "episode" for f in given)
    if isinstance(loop, ProgramConfig) and loop.score != "reward" and not reads:
        yield Finding.warning(
            f"rollout.agent_loop.score = {loop.score}, and no reward function reads what a program scores",
            hint="set reward.function=episode, or rollout.agent_loop.score=reward",
        )
