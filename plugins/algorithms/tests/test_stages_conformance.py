"""The conformance suite on every stage, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_algorithms.conformance.stages import *  # noqa: F403 - every suite
