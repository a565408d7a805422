"""The conformance suite on every objective, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_algorithms.conformance.objectives import *  # noqa: F403 - every suite
from dovetail_algorithms.conformance.preferences import *  # noqa: F403
