"""The conformance suites of this package's plugins."""

from dovetail_tools.conformance import *  # noqa: F403 - every suite
