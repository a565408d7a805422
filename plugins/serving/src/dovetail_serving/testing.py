"""Helpers for tests of engines on servers: the answers of a fake server."""

from __future__ import annotations

from typing import Any

from dovetail_sdk.testing.fake_server import Answer, reply
from dovetail_serving.frames import MEDIA_TYPE, pack


def frame_of(header: dict[str, Any]) -> Answer:
    """Return an answer for `FakeServer` that sends a frame (a binary message) with this header."""
    return lambda request: reply(request, 200, pack(header), MEDIA_TYPE)
