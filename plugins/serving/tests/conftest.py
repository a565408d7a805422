"""A server whose answers a test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dovetail_sdk.testing.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server
