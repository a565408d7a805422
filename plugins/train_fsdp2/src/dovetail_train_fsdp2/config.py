"""Config of the training engine. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.config.sections import EngineSection

Share = Literal["auto", "always", "never"]


@attrs.frozen(kw_only=True)
class Fsdp2Config(EngineSection):
    """PyTorch's own means: autocast over float32 weights, fused AdamW."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    share_prompts: Share = "auto"
    """Compute a prompt once for all of its responses: where that saves work, always where the model allows, or never."""
