"""The config of the transformers rollout engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import attrs

from dovetail.config.sections import RolloutSection


@attrs.frozen(kw_only=True)
class HfRolloutConfig(RolloutSection):
    """Generation by a transformers model in this process."""

    lacks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "mode",
            "tensor_parallel_size",
            "urls",
        ),
        "hf generates in the trainer's process; serving engines have it, such as rollout.name=vllm",
    )

    max_batch_size: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    """Most sequences decoded at once; further requests wait, and enter as rows become free."""
    max_prefill_tokens: int = attrs.field(default=16384, validator=attrs.validators.ge(1))
    """Most prompt tokens, padding included, in one prefill pass (or one prompt)."""
    decoder: Literal["auto", "lean", "transformers"] = "auto"
    """`lean` decodes the Llama family by fused kernels and is proven against transformers at start-up;
    `transformers` runs any architecture; `auto` takes the first where it fits and proves right."""
