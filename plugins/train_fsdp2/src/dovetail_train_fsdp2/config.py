"""Config of the training engine. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.config.fields import ONE_OR_MANY
from dovetail.config.sections import EngineSection

Share = Literal["auto", "always", "never"]
ALL_LINEAR = "all-linear"


@attrs.frozen(kw_only=True)
class LoraSection:
    """Low-rank adapters in place of full training (arXiv 2106.09685). There is no dropout in them."""

    rank: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """Rank of each layer's update."""
    alpha: float = attrs.field(default=32.0, validator=attrs.validators.gt(0))
    """Scale: an update is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / √rank instead (arXiv 2312.03732)."""
    target_modules: tuple[str, ...] = attrs.field(
        default=(ALL_LINEAR,), metadata={ONE_OR_MANY: True}, validator=attrs.validators.min_len(1)
    )
    """Names of the layers to adapt, such as `q_proj`; `all-linear` means every linear layer but the output layer."""


@attrs.frozen(kw_only=True)
class Fsdp2Config(EngineSection):
    """PyTorch's own means: autocast over float32 weights, fused AdamW."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    share_prompts: Share = "auto"
    """Compute a prompt once for all of its responses: where that saves work, always where the model allows, or never."""
    lora: LoraSection | None = None
    """Train low-rank adapters and freeze everything else, which then is the reference policy too; None trains all."""
