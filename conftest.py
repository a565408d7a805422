"""Settings of every test run: hypothesis draws the same examples each time, and new ones in `make nightly`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("steady", derandomize=True)
settings.register_profile("random", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("DOVETAIL_HYPOTHESIS", "steady"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests go to several processes: those of a file to one, and all that start a Ray cluster to one."""
    for item in items:
        path = Path(item.path)
        group = "ray" if "ray" in path.stem.split("_") or "runtime_ray" in path.parts else str(path)
        item.add_marker(pytest.mark.xdist_group(group))
