"""The sandbox for untrusted code. Programs have no network and no access to the run's files; they run within limits, in a temporary
directory.
"""

from dovetail_rewards.sandbox.errors import SandboxError, SandboxUnreachableError
from dovetail_rewards.sandbox.levels import LevelReport, available_levels
from dovetail_rewards.sandbox.local import Sandbox
from dovetail_rewards.sandbox.remote import RemoteSandbox
from dovetail_rewards.sandbox.values import Program, ProgramLimits, ProgramVerdict, Result, Runner

__all__ = [
    "LevelReport",
    "Program",
    "ProgramLimits",
    "ProgramVerdict",
    "RemoteSandbox",
    "Result",
    "Runner",
    "Sandbox",
    "SandboxError",
    "SandboxUnreachableError",
    "available_levels",
]
