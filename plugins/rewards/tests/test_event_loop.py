"""The event loop of async reward functions: it is replaced if blocked, and no call is lost if it was only slow."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dovetail_rewards.managers import event_loop
from dovetail_rewards.managers.event_loop import AsyncLane
from dovetail_rewards.managers.threads import HungCalls

PATIENCE = 120.0


def test_a_call_on_a_loop_that_was_only_slow_has_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_AFTER", 0.0)
    lane = AsyncLane(HungCalls(8))
    blocked, go_on = threading.Event(), threading.Event()

    async def sound() -> str:
        while not go_on.is_set():
            await asyncio.sleep(0.001)
        return "sound"

    async def blocks() -> None:
        blocked.set()
        go_on.wait(PATIENCE)

    async def later() -> str:
        return "later"

    async def main() -> tuple[str, str]:
        running = asyncio.ensure_future(lane.run(sound()))
        blocking = asyncio.ensure_future(lane.run(blocks()))
        await asyncio.to_thread(blocked.wait, PATIENCE)
        blocking.cancel()
        await asyncio.gather(blocking, return_exceptions=True)
        # The loop does not respond, so another loop replaces it while it is still blocked.
        after = await asyncio.wait_for(lane.run(later()), PATIENCE)
        go_on.set()
        return after, await asyncio.wait_for(running, PATIENCE)

    before = set(threading.enumerate())
    assert asyncio.run(main()) == ("later", "sound")
    lane.close()
    lane.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()
