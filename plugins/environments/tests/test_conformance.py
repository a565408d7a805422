"""The conformance suites on this package's plugins."""

from dovetail_environments.conformance import TestEnvironmentsLoop, TestProgramEnvironment

__all__ = ["TestEnvironmentsLoop", "TestProgramEnvironment"]
