"""The conformance suite on every policy loss, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_algorithms.conformance.losses import *  # noqa: F403 - every suite
