"""Conformance suites of this package's plugins, with the configs, answers and services that the suites need."""

from dovetail_rewards.conformance.functions import *  # noqa: F403 - every suite
from dovetail_rewards.conformance.managers import *  # noqa: F403
from dovetail_rewards.conformance.reward_model import *  # noqa: F403
