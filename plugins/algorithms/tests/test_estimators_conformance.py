"""The conformance suite on every estimator, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_algorithms.conformance.estimators import *  # noqa: F403 - every suite
