"""Settings of every test run: hypothesis draws the same examples each time, and new ones in `make nightly`."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("steady", derandomize=True)
settings.register_profile("random", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("DOVETAIL_HYPOTHESIS", "steady"))
