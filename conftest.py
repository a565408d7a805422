"""Settings of every test run: hypothesis draws the same examples each time, and new ones in `make nightly`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No test asks a clock: on a busy machine a deadline would.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("random", derandomize=False, print_blob=True, deadline=None)
settings.load_profile(os.environ.get("DOVETAIL_HYPOTHESIS", "steady"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a Ray cluster: where other tests take the cores, Ray gives up before its processes are up."""
    for item in items:
        path = Path(item.path)
        if "ray" in path.stem.split("_") or "runtime_ray" in path.parts:
            item.add_marker(pytest.mark.ray)
