"""Starting processes as Ray actors: what each is told, and those of training ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray

from dovetail_runtime_ray.config import RayConfig
from dovetail_runtime_ray.process import CONTROL, CONTROL_THREADS, HostProcess
from dovetail_runtime_ray.reserve import Reserved
from dovetail_runtime_ray.wire import Environment, Setup

_DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG"
"""Set by the controller where kernels must be deterministic; workers need the same."""


def setup_of(
    config: RayConfig,
    *,
    label: str,
    rank: int,
    accelerator: bool,
    run_directory: str | None,
    threads: int,
    deterministic: bool,
    loopback: bool,
    plugins: dict[str, Any] | None = None,
    place: Environment | None = None,
    spread: bool = False,
) -> Setup:
    """What a process is told; for the fields see `Setup`."""
    # Nobody sees a progress bar there: it would only fill the log files.
    environment = {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    if loopback:
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if deterministic and _DETERMINISTIC in os.environ:
        environment[_DETERMINISTIC] = os.environ[_DETERMINISTIC]
    return Setup(
        label=label,
        rank=rank,
        accelerator=accelerator,
        working_directory=str(Path.cwd()),
        run_directory=run_directory,
        environment=environment | config.env_vars,
        threads=threads,
        deterministic=deterministic,
        plugins=plugins,
        place=place or Environment(),
        spread=spread,
    )


def rank(reserved: Reserved, number: int, parts: int, setup: Setup) -> Any:
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
    """Ray's actor class of a process, with threads beside the calls."""
    remote: Any = ray.remote
    return remote(concurrency_groups={CONTROL: CONTROL_THREADS})(cls)
