"""Errors of the sandbox itself. A failing program gives a Result instead."""

from __future__ import annotations

from dovetail.errors import DovetailError


class SandboxError(DovetailError, OSError):
    """The sandbox can't be set up on this machine, or is used wrongly; a retry does not help."""


class SandboxUnreachableError(SandboxError, ConnectionError):
    """The sandbox did not answer: its helper or service is gone, overloaded or unreachable."""
