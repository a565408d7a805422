"""Config classes of the optimizers and schedules. This module does not import torch."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import OptimSection, PluginSection, Validator

_BETAS: Validator = attrs.validators.deep_iterable(
    attrs.validators.and_(attrs.validators.ge(0), attrs.validators.lt(1))
)


@attrs.frozen(kw_only=True)
class AdamWConfig(OptimSection):
    """AdamW (arXiv 1711.05101) in PyTorch's fused implementation."""

    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=_BETAS)
    """Decays of the moments."""
    eps: float = attrs.field(default=1e-8, validator=attrs.validators.gt(0))
    """Constant added to the denominator."""


@attrs.frozen(kw_only=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW of torchao, with 8-bit moments in blocks of 256 (arXiv 2110.02861): 2 bytes of state per parameter in place of 8.

    A parameter's moments stay float32 if its shard has fewer than 4,096 elements, or a number of elements that is not a multiple of 256.
    The kernels are compiled at the first step.
    """


@attrs.frozen(kw_only=True)
class MuonConfig(OptimSection):
    """Muon (arXiv 2502.16982) for the matrices of hidden layers, AdamW for embeddings, output layer, norms and biases."""

    momentum: float = attrs.field(
        default=0.95, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Decay of the average of gradients."""
    nesterov: bool = True
    """Whether to use Nesterov momentum, which looks ahead by one step."""
    newton_schulz_steps: int = attrs.field(
        default=5, validator=[attrs.validators.ge(1), attrs.validators.lt(100)]
    )
    """Iterations that make the step orthogonal."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the step of an out × in matrix. match_rms_adamw: 0.2 · √max(out, in), for learning rates as AdamW's. original:
    √max(1, out / in)."""
    adamw_lr: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(0))
    )
    """AdamW's peak learning rate; absent: `lr`."""
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.999), validator=_BETAS)
    """Decays of AdamW's moments."""
    eps: float = attrs.field(default=1e-8, validator=attrs.validators.gt(0))
    """Constant added to AdamW's denominator."""


@attrs.frozen(kw_only=True)
class AdafactorConfig(OptimSection):
    """PyTorch's Adafactor (arXiv 1804.04235), which keeps only row and column averages of a matrix's second moments."""

    lr: float = attrs.field(default=1e-3, validator=attrs.validators.ge(0))
    """Peak learning rate, relative to the root mean square of each parameter."""
    weight_decay: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    """Decoupled weight decay: a step multiplies each weight by 1 − lr · weight_decay."""
    beta2_decay: float = attrs.field(default=-0.8, validator=attrs.validators.le(0))
    """Exponent of the second moments' decay, which is 1 − t ** beta2_decay at step t."""
    min_scale: float = attrs.field(default=1e-3, validator=attrs.validators.gt(0))
    """A parameter's learning rate is multiplied by the root mean square of its weights, but at least by this number."""
    clip: float = attrs.field(default=1.0, validator=attrs.validators.ge(1))
    """Largest root mean square of a parameter's update, before the learning rate is applied."""


@attrs.frozen(kw_only=True)
class SgdConfig(OptimSection):
    """Gradient descent: w ← w − lr · (g + weight_decay · w), with momentum or without."""

    momentum: float = attrs.field(
        default=0.0, validator=[attrs.validators.ge(0), attrs.validators.lt(1)]
    )
    """Decay of the running sum of gradients; 0 for no momentum."""
    nesterov: bool = False
    """Whether to use Nesterov momentum, which looks ahead by one step."""

    def __attrs_post_init__(self) -> None:
        """Refuse Nesterov without momentum, as torch does."""
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov=true needs a momentum above 0, but momentum is 0; set momentum=0.9"
            )


@attrs.frozen(kw_only=True)
class WsdConfig(PluginSection):
    """Warm-up, stable, decay (arXiv 2404.06395): the peak rate, then a decay to `min_lr_ratio` times the peak in the last steps."""

    decay_share: float = attrs.field(
        default=0.1, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )
    """Share of the steps after warm-up during which the rate decays; these are the last steps."""
    decay: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay from 1 (the peak rate) to 0 (the lowest rate), while x rises from 0 to 1. linear: 1 − x. sqrt: 1 − √x
    (arXiv 2405.18392). cosine: (1 + cos πx) / 2."""
