"""What `dovetail doctor` says of TensorRT-LLM: whether it is here, how it is installed, and that it is untried."""

from __future__ import annotations

from typing import Any

from dovetail_rollout_trtllm.versions import DESCRIBED, INSTALL, OLDEST, installed

UNTRIED = f"the plugin was built against its source ({OLDEST} to {DESCRIBED}) and has not run on it"


def examine() -> list[dict[str, Any]]:
    """One row.

    Returns:
        `what` and `detail` in words, `available`, and `problem`: None, since an engine that is missing or old is a need of
        its users alone.
    """
    found = installed()
    available = found is not None and found >= OLDEST
    if found is None:
        detail = f"not installed: {INSTALL} (in an environment of its own; CUDA 13 and NVIDIA accelerators); {UNTRIED}"
    elif available:
        detail = f"{found}; {UNTRIED}"
    else:
        detail = f"{found} is too old: {INSTALL} --upgrade; {UNTRIED}"
    return [{"what": "TensorRT-LLM", "available": available, "detail": detail, "problem": None}]
