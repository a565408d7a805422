"""What the conformance suites need to know of these plugins: the configs under which estimators and losses are checked."""

from dovetail_algorithms.conformance.estimators import *  # noqa: F403 - every suite
from dovetail_algorithms.conformance.losses import *  # noqa: F403
