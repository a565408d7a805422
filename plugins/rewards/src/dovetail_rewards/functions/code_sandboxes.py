"""Sandboxes by options: in one process, reward functions with equal options share a sandbox."""

from __future__ import annotations

import atexit
import functools
import threading

from dovetail_rewards.config_code import SandboxSection
from dovetail_rewards.sandbox import ProgramLimits, RemoteSandbox, Runner, Sandbox

_lock = threading.Lock()


def runner_for(config: SandboxSection) -> Runner:
    """Return the sandbox that a config selects; its helper process starts with the first program.

    Raises:
        SandboxError: the isolation level is not available on this machine.
    """
    with _lock:
        return _made(
            config.service,
            config.level,
            config.python,
            tuple(config.packages),
            tuple(config.preload),
        )


def limits_of(config: SandboxSection) -> ProgramLimits:
    """Return the resource limits of a program under a config."""
    return ProgramLimits(
        cpu_s=config.time_limit,
        memory=config.memory_mb << 20,
        output=config.output_kb << 10,
        processes=config.processes,
    )


@functools.cache
def _made(
    service: str | None,
    level: str,
    python: str | None,
    packages: tuple[str, ...],
    preload: tuple[str, ...],
) -> Runner:
    if service is not None:
        return RemoteSandbox(service)
    sandbox = Sandbox(
        level=level,
        python=python,
        packages=packages,
        preload=preload,
    )
    atexit.register(sandbox.close)
    return sandbox
