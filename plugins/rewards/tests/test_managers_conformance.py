"""The conformance suite on every reward manager, as `dovetail plugins check` runs it."""

from __future__ import annotations

from dovetail_rewards.conformance.managers import *  # noqa: F403 - every suite
from dovetail_rewards.conformance.reward_model import *  # noqa: F403
