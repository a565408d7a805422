"""Starting processes as Ray actors."""

from __future__ import annotations

from typing import Any

import ray

from dovetail_runtime_ray.process import CONTROL, CONTROL_THREADS, HostProcess
from dovetail_runtime_ray.reserve import Reserved
from dovetail_runtime_ray.wire import ProcessSetup


def rank(reserved: Reserved, number: int, parts: int, setup: ProcessSetup) -> Any:
    """Start the process of a training rank; returns its handle at once.

    Args:
        reserved: its pool.
        number: the rank.
        parts: how many processes share its accelerator.
        setup: what it is told.
    """
    return (
        actor_class(HostProcess)
        .options(
            **reserved.options(number, parts=parts),
            runtime_env=setup.runtime_env(),
        )
        .remote(setup)
    )


def actor_class(cls: type) -> Any:
    """Return Ray's actor class of a process, with threads beside the calls."""
    remote: Any = ray.remote
    return remote(concurrency_groups={CONTROL: CONTROL_THREADS})(cls)
