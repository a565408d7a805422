"""Helpers to interrupt a running request, by the engine's own progress and not by a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest

from dovetail.interfaces import BaseRollout, Completion, RolloutRequest

TIMEOUT = 600.0
"""Seconds to wait for an answer, enough for a slow engine on a busy machine."""
_ATTEMPTS = 20


async def collected(engine: BaseRollout, request: RolloutRequest) -> list[Completion]:
    """Submit a request and return all of its samples, in sample order."""
    found = [completion async for completion in engine.submit(request)]
    return sorted(found, key=lambda completion: completion.sample)


async def begun(engine: BaseRollout, request: RolloutRequest, tokens: int = 4) -> None:
    """Wait until a request that was just submitted has generated about `tokens` tokens.

    The function submits a copy of the request that is limited to `tokens` tokens, and returns when the copy has finished.
    """
    short = attrs.evolve(
        request,
        request_id=f"{request.request_id}.beside",
        sampling=attrs.evolve(request.sampling, max_new_tokens=tokens),
        streams=request.streams[:1],
    )
    await asyncio.wait_for(collected(engine, short), TIMEOUT)


def order_of_waiting(engine: BaseRollout, request: RolloutRequest) -> list[int]:
    """Queue four requests behind eight running requests, and return the priorities of the four in order of completion.

    Args:
        engine: a started engine that runs eight samples at once.
        request: a request for one sample; all twelve requests are copies of it with different ids, priorities and maximum lengths.
    """
    ended: list[int] = []

    async def one(number: int, priority: int, tokens: int) -> None:
        sampling = attrs.evolve(request.sampling, max_new_tokens=tokens)
        named = attrs.evolve(request, request_id=f"request {number}", sampling=sampling)
        await collected(engine, attrs.evolve(named, priority=priority))
        ended.append(priority)

    async def all_of_them() -> None:
        first = [one(number, 0, 40 + 20 * number) for number in range(8)]
        later = [one(8 + number, priority, 8) for number, priority in enumerate((9, 8, 2, 1))]
        await asyncio.gather(*first, *later)

    asyncio.run(all_of_them())
    return [priority for priority in ended if priority]


async def interrupted(
    engine: BaseRollout,
    request: RolloutRequest,
    interrupt: Callable[[], Awaitable[Any]],
    caught: Callable[[list[Completion]], bool],
) -> list[Completion]:
    """Submit a request and interrupt it, and repeat this until its samples are interrupted in the middle.

    Args:
        engine: a started engine.
        request: a request that runs long enough to be interrupted.
        interrupt: the interruption, awaited while the request runs; afterwards the request must end.
        caught: a function that returns whether the samples were interrupted in the middle.

    Returns:
        The samples of the interrupted request.
    """
    for attempt in range(_ATTEMPTS):
        running = asyncio.create_task(collected(engine, request))
        await begun(engine, request, 4 << attempt % 7)
        await interrupt()
        found = await asyncio.wait_for(running, TIMEOUT)
        if caught(found):
            return found
    pytest.fail(f"no sample was interrupted in the middle in {_ATTEMPTS} attempts: {found}")


def versions_of(completion: Completion) -> dict[int, int]:
    """Return how many of a completion's tokens each weight version generated, by version, in the order of first use."""
    counts: dict[int, int] = {}
    for version in completion.weight_versions.tolist():
        counts[version] = counts.get(version, 0) + 1
    return counts
