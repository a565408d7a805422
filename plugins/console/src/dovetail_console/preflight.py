"""A preflight rule: the installed torch can't use the GPUs of this host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.interfaces import Finding
from dovetail_console.host import cpu_torch_on_gpu_host


def torch_without_gpus(config: Any, plan: Any) -> Iterator[Finding]:
    """Warn if this machine has a GPU, but the installed torch is built for the CPU alone, with which a run is many times slower."""
    if problem := cpu_torch_on_gpu_host():
        message, _, fix = problem.partition("\n  → ")
        yield Finding.warning(message, hint=fix)
