"""The conformance suite on every tracker, as `dovetail plugins check` runs it."""

from __future__ import annotations

import pytest

from dovetail_trackers.conformance import *  # noqa: F403 - every suite

pytestmark = pytest.mark.trackers
