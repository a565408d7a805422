"""Conformance suites of the plugins that core ships. Core does not know the SDK, so they are declared here."""

from dovetail_sdk.check.of_core.parts import *  # noqa: F403 - every suite
from dovetail_sdk.check.of_core.rules import *  # noqa: F403
from dovetail_sdk.check.of_core.stages import *  # noqa: F403
