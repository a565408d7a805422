"""The conformance suite on every function, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_rewards_extra.conformance import *  # noqa: F403 - every suite
