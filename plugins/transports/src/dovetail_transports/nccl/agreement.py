"""Properties that all processes of a group must share; they are compared before the group is formed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import WeightSyncError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MEMORY = "NCCL_CUMEM_ENABLE"
_BY_ITSELF = "-2"
"""NCCL's default value of `NCCL_CUMEM_ENABLE`: NCCL uses what the driver supports."""


def described(backend: str) -> dict[str, Any]:
    """Return the properties of this process that `agree` compares, as JSON values.

    Args:
        backend: `nccl` or `gloo`.

    Returns:
        `backend`: a list of the backend and, for NCCL, its version. For NCCL also `machine`, and `memory`: how NCCL
        shares memory with other processes of the machine.
    """
    if backend != "nccl":
        return {"backend": [backend]}
    nccl: Any = torch.cuda.nccl
    return {
        "backend": [backend, *nccl.version()[:2]],
        "machine": _machine(),
        "memory": os.environ.get(_MEMORY, "").strip() or _BY_ITSELF,
    }


def agree(ours: Mapping[str, Any], receivers: Iterable[Mapping[str, Any]]) -> None:
    """Check that sender and receivers can form a process group.

    Args:
        ours: the sender's result of `described`.
        receivers: the receivers' results of `described`.

    Raises:
        WeightSyncError: a receiver's backend or NCCL version differs from the sender's, or NCCL shares memory in
            different ways on one machine.
    """
    memory: dict[str, str] = {}
    for who, one in (("the sender", ours), *(("a receiver", theirs) for theirs in receivers)):
        if one.get("backend") != ours["backend"]:
            raise WeightSyncError(
                f"a receiver uses {_in_words(one.get('backend'))}, but the sender uses "
                f"{_in_words(ours['backend'])}",
                hint="set the same rollout.weight_transport.backend on both sides, and install the same version of NCCL for both",
            )
        # A receiver of an older release does not report `memory`.
        if "memory" not in one:
            continue
        first = memory.setdefault(one["machine"], one["memory"])
        # Only `0` is known to differ from the other values, since NCCL's own choice can't be queried.
        if (first == "0") != (one["memory"] == "0"):
            raise WeightSyncError(
                f"{who} has {_setting(one['memory'])}, but another process of its group on the same machine has "
                f"{_setting(first)}: NCCL can't connect them",
                hint=f"start the rollout's servers and the trainer with the same {_MEMORY}. An engine may set the variable if it is "
                f"unset; the value {_BY_ITSELF} leaves the choice to NCCL",
            )


def _machine() -> str:
    """Return the name by which NCCL distinguishes machines; a container with its own host name counts as a machine."""
    named = os.environ.get("NCCL_HOSTID")
    if named:
        return named
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _setting(value: str) -> str:
    return f"{_MEMORY} unset or {value}" if value == _BY_ITSELF else f"{_MEMORY}={value}"


def _in_words(description: Any) -> str:
    name, *version = description or ["nothing"]
    return f"{name} {'.'.join(map(str, version))}".strip()
