"""Fixtures: a rendezvous root for every test, whose path is short enough for sockets, and transports below it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.interfaces import PluginContext
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.transport import SharedMemoryTransport


@pytest.fixture
def meetings() -> Iterator[Path]:
    """The directory in which senders and receivers of a test meet."""
    root = Path(tempfile.mkdtemp(prefix="dt-"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def transport(meetings: Path):
    """A function that makes a transport; the transports of one test find each other."""

    def make(*, rank: int = 0, role: str = "rollout", **config) -> SharedMemoryTransport:
        return SharedMemoryTransport(
            SharedMemoryConfig(
                name="shared_memory",
                directory=str(meetings),
                channel="test",
                **{"timeout": 60.0, **config},
            ),
            PluginContext(rank=rank, role=role),
        )

    return make
