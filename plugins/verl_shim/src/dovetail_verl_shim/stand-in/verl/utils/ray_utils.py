"""Access to a thread's event loop."""

from __future__ import annotations

import asyncio


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the thread's event loop, or a new loop if the thread has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop
