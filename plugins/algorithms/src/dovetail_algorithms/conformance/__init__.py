"""Conformance suites of this package's plugins, with the configs under which estimators, losses and objectives are checked."""

from dovetail_algorithms.conformance.estimators import *  # noqa: F403 - every suite
from dovetail_algorithms.conformance.losses import *  # noqa: F403
from dovetail_algorithms.conformance.objectives import *  # noqa: F403
from dovetail_algorithms.conformance.preferences import *  # noqa: F403
from dovetail_algorithms.conformance.stages import *  # noqa: F403
