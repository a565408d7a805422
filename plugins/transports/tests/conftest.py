"""A root of meetings for every test, short enough for sockets, and ends below it."""

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
    """Where the ends of a test meet."""
    root = Path(tempfile.mkdtemp(prefix="dt-"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def transport(meetings: Path):
    """Makes a transport; those of one test find each other."""

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
