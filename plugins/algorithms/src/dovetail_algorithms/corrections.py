"""Rollout corrections: importance weights and rejection by π_train / π_rollout, and presets by name.

Legend: T response tokens, packed end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dovetail.interfaces import (
    Correction,
    CorrectionInputs,
    CorrectionMode,
    PluginConfig,
    Reduction,
    RolloutCorrection,
)
from dovetail.metrics import Metric
from dovetail_algorithms.config.corrections import CONFIGS, RolloutCorrectionConfig
from dovetail_stages import (
    Criterion,
    bounded_weights,
    divergence_metrics,
    importance_ratios,
    kept_tokens,
    log_ratios,
    normalized_weights,
    rejection_metrics,
    weight_metrics,
)


class CorrectionByRatio(RolloutCorrection):
    """Weighs tokens by r = π_train / π_rollout within bounds, and rejects tokens whose r is too far from 1.

    w_t = min(r_t, upper) for `weights: token`, w = min(Π_t r_t, upper) for `weights: sequence`. A ratio beyond a bound counts as the
    bound (truncated importance sampling) or as 0 (`weight_outside: zero`: IcePop, arXiv 2510.18855). A token keeps its loss only if it
    meets every criterion of `reject`; rejected tokens have weight 0. `normalize_weights` scales the weights of all other tokens to a mean
    of 1. A subclass is a preset: a name and defaults.
    """

    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = RolloutCorrectionConfig

    @classmethod
    def mode(cls, config: PluginConfig) -> CorrectionMode:
        return cast("CorrectionMode", config.mode)

    @classmethod
    def before_update(cls, config: PluginConfig) -> bool:
        return config.mode == "decoupled" and (bool(config.reject) or config.normalize_weights)

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset() if config.mode == "disabled" else frozenset({"rollout_log_probs"})

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        """Return the columns that the correction adds before the update; empty if it is computed within the update."""
        if config.mode != "decoupled":
            return frozenset()
        weights = {"rollout_is_weights"} if config.weights is not None else set()
        return frozenset(weights | ({"loss_mask"} if config.reject else set()))

    def correct(self, inputs: CorrectionInputs, reduction: Reduction) -> Correction:
        if self.config.mode == "disabled":
            return Correction()
        with torch.no_grad():
            log_ratio_T = log_ratios(inputs)
            metrics: dict[str, Metric] = divergence_metrics(inputs)
            keep_T = inputs.mask_T
            if self.config.reject:
                keep_T = self._reject(inputs, log_ratio_T, metrics)
            weights_T = None
            if self.config.weights is not None:
                weights_T = self._weigh(inputs, log_ratio_T, keep_T, reduction, metrics)
        return Correction(
            weights_T=weights_T, keep_T=keep_T if self.config.reject else None, metrics=metrics
        )

    def _reject(
        self, inputs: CorrectionInputs, log_ratio_T: Float[Tensor, "T"], metrics: dict[str, Metric]
    ) -> Bool[Tensor, "T"]:
        """Return a mask, bool [T], of the tokens to keep: those in `inputs.mask_T` that meet every criterion. Adds to `metrics`."""
        keep_T, kept = inputs.mask_T, {}
        for section in self.config.reject:
            criterion = Criterion.named(section.by, lower=section.lower, upper=section.upper)
            meets_T = kept_tokens(log_ratio_T, inputs.mask_T, inputs.offsets_N1, criterion)
            kept[criterion.name] = meets_T
            keep_T = keep_T & meets_T
        metrics |= rejection_metrics(inputs, kept, keep_T)
        return keep_T

    def _weigh(
        self,
        inputs: CorrectionInputs,
        log_ratio_T: Float[Tensor, "T"],
        keep_T: Bool[Tensor, "T"],
        reduction: Reduction,
        metrics: dict[str, Metric],
    ) -> Float[Tensor, "T"]:
        config = self.config
        ratio_T = importance_ratios(log_ratio_T, inputs.offsets_N1, config.weights)
        weights_T = bounded_weights(
            ratio_T,
            lower=config.weight_lower,
            upper=config.weight_upper,
            outside=config.weight_outside,
        ).where(keep_T, 0)
        if config.normalize_weights:
            weights_T = normalized_weights(weights_T, keep_T, reduction)
        metrics |= weight_metrics(
            ratio_T, weights_T, keep_T, lower=config.weight_lower, upper=config.weight_upper
        )
        return weights_T


_IN_BYPASS = """

A rejected token has no policy loss and still counts in the loss's denominator, which is fixed before the update;
under a decoupled correction it does not count."""
_WITHOUT_RATIO = """

In a config:

    algorithm:
      policy_loss: reinforce"""


def _preset(name: str, config: type[RolloutCorrectionConfig]) -> type[CorrectionByRatio]:
    """Make the plugin class of a preset, whose Config has the preset's defaults."""
    default = config()
    doc = str(config.__doc__)
    doc += _IN_BYPASS if default.mode == "bypass" and default.reject else ""
    doc += _WITHOUT_RATIO if name.startswith("bypass_pg") else ""
    body = {"__doc__": doc, "__module__": __name__, "name": name, "Config": config}
    return type(config.__name__.removesuffix("Config"), (CorrectionByRatio,), body)


CORRECTIONS: Mapping[str, type[CorrectionByRatio]] = {
    name: _preset(name, config) for name, config in CONFIGS.items()
}
"""The plugin class of each preset, by its name."""
# Entry points find a plugin class by module and name, so the generated classes must be globals.
globals().update({cls.__name__: cls for cls in CORRECTIONS.values()})
