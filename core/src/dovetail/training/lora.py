"""The config section of low-rank adapters, the same for every training engine. Nothing here imports torch."""

from __future__ import annotations

import math
from typing import Literal

import attrs

from dovetail.sections.adapter import PlannedAdapter
from dovetail.sections.fields import ONE_OR_MANY

Sync = Literal["merged", "adapter"]
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
    dora: bool = False
    """Learn the magnitude of each weight's rows apart from their direction (arXiv 2402.09353)."""
    sync: Sync = "merged"
    """What travels to the rollout: the base's weights with the update added, or the adapter alone, which the rollout
    engine must then know how to apply."""
    target_modules: tuple[str, ...] = attrs.field(
        default=(ALL_LINEAR,), metadata={ONE_OR_MANY: True}, validator=attrs.validators.min_len(1)
    )
    """Names of the layers to adapt, such as `q_proj`; `all-linear` means every linear layer but the output layer."""
    adapter_path: str | None = None
    """Directory of an adapter in peft's form that training starts from, with the rank, scale and layers of this section. The
    reference policy stays the base without it."""

    def planned(self) -> PlannedAdapter:
        """What a rollout that is to apply the adapter can be asked about before anything is loaded."""
        named = tuple(name for name in self.target_modules if name != ALL_LINEAR)
        return PlannedAdapter(
            rank=self.rank,
            dora=self.dora,
            target_modules=named,
            all_linear=ALL_LINEAR in self.target_modules,
        )

    @property
    def scale(self) -> float:
        """What an update is multiplied by: alpha / rank, or alpha / √rank where rank-stabilised."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)
