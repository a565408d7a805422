"""What the conformance suites need to know of these plugins: configs, answers, and services to ask."""

from dovetail_rewards.conformance.functions import *  # noqa: F403 - every suite
from dovetail_rewards.conformance.managers import *  # noqa: F403
from dovetail_rewards.conformance.reward_model import *  # noqa: F403
