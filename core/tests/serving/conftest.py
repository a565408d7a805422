"""A server that answers as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dovetail_sdk.testing.fake_server import FakeServer, frame_of, reply, words_of


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def answers() -> Any:
    """Makes answers of a fake server: `answers.frame(header)`, `answers.words(json)`, `answers.reply(request, …)`."""

    class Answers:
        frame = staticmethod(frame_of)
        words = staticmethod(words_of)
        reply = staticmethod(reply)

    return Answers
