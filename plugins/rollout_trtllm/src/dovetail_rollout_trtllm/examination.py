"""The report of `dovetail doctor` on TensorRT-LLM."""

from __future__ import annotations

from typing import Any

from dovetail_rollout_trtllm.server import INSTALL, program_of


def examine() -> list[dict[str, Any]]:
    """Return one row for `dovetail doctor`: `what`, `available`, `detail`, and `problem`, which is None since TensorRT-LLM is optional."""
    found = program_of("trtllm-serve")
    detail = f"{found or f'trtllm-serve is not found: {INSTALL}'}; the plugin has not run on the real engine"
    return [
        {"what": "TensorRT-LLM", "available": found is not None, "detail": detail, "problem": None}
    ]
