"""The config section of low-rank adapters, the same for every training engine. This module does not import torch."""

from __future__ import annotations

import math
import re
from typing import Literal

import attrs

from dovetail.sections import ONE_OR_MANY, EngineSection, PlannedAdapter

Sync = Literal["merged", "adapter"]
ALL_LINEAR = "all-linear"


@attrs.frozen(kw_only=True)
class LoraSection:
    """Low-rank adapters in place of full training (arXiv 2106.09685). They have no dropout."""

    rank: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    """Rank of each layer's update."""
    alpha: float = attrs.field(default=32.0, validator=attrs.validators.gt(0))
    """Scale: an update is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply an update by alpha / √rank instead of alpha / rank (arXiv 2312.03732)."""
    dora: bool = False
    """Learn the magnitude of each weight's rows apart from their direction (arXiv 2402.09353)."""
    sync: Sync = "merged"
    """What a weight update sends to the rollout: `merged`, the base's weights with the adapter merged; or `adapter`, only the
    adapter, if the rollout engine supports adapters."""
    target_modules: tuple[str, ...] = attrs.field(
        default=(ALL_LINEAR,), metadata={ONE_OR_MANY: True}, validator=attrs.validators.min_len(1)
    )
    """Names of the layers to adapt, such as `q_proj`; `all-linear` means every linear layer but the output layer."""
    exclude_modules: str | None = None
    """Regular expression on full names of layers that get no adapter even if `target_modules` matches, such as `.*visual.*`. The
    same as peft's field of this name."""
    base: Literal["nf4"] | None = None
    """Keep the frozen linear layers in 4-bit NormalFloat (QLoRA, arXiv 2305.14314), in a quarter of bfloat16's memory; None keeps full
    precision. The reference policy, exports and the rollout then use these quantised weights too; the rollout gets them with the adapter's
    update added.
    """
    adapter_path: str | None = None
    """Directory of an adapter in peft's format from which training starts; its rank, scale and layers must match this section. The
    reference policy is the base without this adapter."""

    def __attrs_post_init__(self) -> None:
        """Check that `exclude_modules` is a regular expression, and that `base` is set neither with `sync=adapter` nor with `dora`.

        With `sync=adapter` the rollout would add the adapter to a base that is not quantised; DoRA needs the unquantised weights' norms.
        """
        if self.exclude_modules is not None:
            try:
                re.compile(self.exclude_modules)
            except re.error as error:
                raise ValueError(
                    f"exclude_modules={self.exclude_modules!r} is not a regular expression: {error}; expected one such as .*visual.*"
                ) from error
        if self.base is not None and self.sync == "adapter":
            raise ValueError(
                f"base={self.base} can't be combined with sync=adapter, because the rollout's base is not quantised; set sync=merged"
            )
        if self.base is not None and self.dora:
            raise ValueError(
                f"base={self.base} can't be combined with dora=true: DoRA needs the norms of unquantised weights; set dora=false"
            )

    def planned(self) -> PlannedAdapter:
        """Return the adapter's description, which a rollout checks before it loads a model."""
        named = tuple(name for name in self.target_modules if name != ALL_LINEAR)
        return PlannedAdapter(
            rank=self.rank,
            dora=self.dora,
            base=self.base,
            target_modules=named,
            all_linear=ALL_LINEAR in self.target_modules,
            excluded=self.exclude_modules,
        )

    @property
    def scale(self) -> float:
        """The factor of the adapter's product B A: alpha / rank, or alpha / √rank if `rank_stabilised`."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@attrs.frozen(kw_only=True)
class AdaptableSection(EngineSection):
    """The config of an engine that can train an adapter."""

    lora: LoraSection | None = None
    """Train low-rank adapters and freeze all other weights. The frozen weights are also the reference policy. None trains all weights."""

    def weight_kind(self) -> Literal["full", "adapter"]:
        """Return the kind of weights that an update sends: `adapter` if `lora.sync` is `adapter`, else `full`."""
        return "adapter" if self.lora is not None and self.lora.sync == "adapter" else "full"

    def adapter_rank(self) -> int | None:
        return None if self.lora is None else self.lora.rank

    def planned_adapter(self) -> PlannedAdapter:
        return PlannedAdapter() if self.lora is None else self.lora.planned()
