"""The environment of a run on this machine: accelerators, and whether the installed torch can use them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from dovetail.plugins import torch_build

_DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_names() -> list[str]:
    """Return the names of this host's NVIDIA GPUs, found through the driver, without torch."""
    if _DRIVER.is_dir():
        names = [_name_in(folder / "information") for folder in sorted(_DRIVER.iterdir())]
        if names:
            return names
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        listing = subprocess.run(  # noqa: S603 - the driver's own tool, found on PATH
            [command, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listing.splitlines() if line.strip()]


VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "RAY_ADDRESS",
    "VIRTUAL_ENV",
)
"""Environment variables that change what a run finds or how it runs."""


def described() -> dict[str, Any]:
    """Return this machine's usable processors, bytes of memory and free disk, and environment variables (those in `VARIABLES`, if set)."""
    usable = getattr(os, "sched_getaffinity", None)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        memory = None
    return {
        "processors": len(usable(0)) if usable else os.cpu_count(),
        "memory_bytes": memory,
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def torch_version() -> str | None:
    """Return the installed version of torch, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_torch_on_gpu_host() -> str | None:
    """Return a warning, with the command that fixes it, if this machine has a GPU that torch can't use; else None."""
    if torch_build() != "cpu":
        return None
    gpus = gpu_names()
    if not gpus:
        return None
    many = f"{len(gpus)} GPUs are" if len(gpus) > 1 else "A GPU is"
    return (
        f"{many} here ({gpus[0]}), but the installed torch {torch_version()} is a CPU build and will "
        "not use it\n  → pip install --force-reinstall torch  (in a checkout: make setup DEVICE=cuda)"
    )


def _name_in(information: Path) -> str:
    try:
        text = information.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "NVIDIA GPU"
    match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else "NVIDIA GPU"
