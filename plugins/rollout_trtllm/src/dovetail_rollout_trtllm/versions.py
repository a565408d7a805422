"""Which TensorRT-LLM is installed, and whether it is one that this plugin drives. Nothing here imports it."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.version import Version

from dovetail.errors import PluginNeedsError

DISTRIBUTIONS = {"tensorrt-llm": "tensorrt_llm", "ray": "ray"}
"""The engine and the orchestrator under which it takes weights, with the packages that they bring."""
OLDEST = Version("1.3.0rc21")
"""The first release that is known to be built for torch 2.11, which Dovetail's core needs."""
DESCRIBED = Version("1.4.0rc1")
"""The newest release that `tests/contract/tensorrt_llm.json` describes."""
INSTALL = (
    "pip install --pre 'dovetail-rollout-trtllm[engine]' --extra-index-url https://pypi.nvidia.com"
)
"""The vendor's wheels are on its own index, releases newer than 1.2.1 as pre-releases."""


def installed() -> Version | None:
    """The TensorRT-LLM of this environment, found without importing it; None where there is none."""
    try:
        return Version(importlib.metadata.version("tensorrt-llm"))
    except importlib.metadata.PackageNotFoundError:
        return None


def require() -> Version:
    """The TensorRT-LLM of this environment, where it is one that this plugin drives.

    Raises:
        PluginNeedsError: there is none, it is too old, or Ray is missing; says what to install.
    """
    found = installed()
    if found is None:
        raise PluginNeedsError(
            "rollout 'trtllm' needs TensorRT-LLM, which is not installed", hint=INSTALL
        )
    if found < OLDEST:
        raise PluginNeedsError(
            f"rollout 'trtllm' needs TensorRT-LLM {OLDEST} or newer, and {found} is installed: it is built for a torch "
            "older than 2.11",
            hint=f"{INSTALL} --upgrade",
        )
    for distribution, package in DISTRIBUTIONS.items():
        if importlib.util.find_spec(package) is None:
            raise PluginNeedsError(
                f"rollout 'trtllm' needs the package `{package}`, which is missing (distribution {distribution})",
                hint=INSTALL,
            )
    return found
