"""Rollout engines as tests start them on this machine: on its accelerator, or on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

STAND_INS = Path(__file__).parents[2] / "plugins" / "rollout_sglang" / "tests" / "stand_ins"
ACCELERATOR = torch.accelerator.is_available()


def needs(module: str) -> pytest.MarkDecorator:
    """Skips where an engine is not installed."""
    absent = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(absent, reason=f"{module} is not installed here")


def engine_settings(engine: str, device: str, *, max_model_len: int) -> dict[str, Any]:
    """Return the settings of `hf`, `vllm` or `sglang` on the device `cpu` or `cuda`, where others compute, too."""
    if engine == "hf":
        return {}
    length = {"max_model_len": max_model_len}
    if device == "cuda":
        length["gpu_memory_utilization"] = 0.2
    if engine == "vllm":
        return length if device == "cuda" else {"enforce_eager": True, **length}
    if device == "cuda":
        # Further arguments, a JSON object, where the SGLang of a machine lacks what it would choose, such as
        # `{"attention_backend": "triton", "sampling_backend": "pytorch"}` without FlashAttention 3.
        arguments = os.environ.get("DOVETAIL_TEST_SGLANG_ARGUMENTS", "{}")
    else:
        arguments = (STAND_INS / "arguments.json").read_text()
    return {"engine_args": json.loads(arguments), **length}


@contextmanager
def served_here(engine: str, device: str) -> Iterator[None]:
    """In the block, servers of SGLang on a CPU find modules that stand in for its kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if (engine, device) == ("sglang", "cpu"):
            patch.setenv("PYTHONPATH", str(STAND_INS), prepend=os.pathsep)
        yield
