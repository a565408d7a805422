"""PlannedAdapter: an adapter as the config describes it, before a model is loaded. This module does not import torch."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class PlannedAdapter:
    """A low-rank adapter (arXiv 2106.09685) as a training engine's config describes it."""

    rank: int | None = None
    """Rank of the adapter B A: rows of A and columns of B; None if unknown."""
    dora: bool = False
    """Whether magnitudes of the weights' rows are trained and sent too (DoRA, arXiv 2402.09353)."""
    base: Literal["nf4"] | None = None
    """Quantisation (4 bits) of the linear layers below the adapter; None for full precision."""
    target_modules: tuple[str, ...] = ()
    """Layers that the config names, such as `q_proj`; empty if the config leaves them to the engine."""
    excluded: str | None = None
    """Regular expression on full names of the layers that are left out."""
    all_linear: bool = False
    """Whether every linear layer but the output layer is adapted, besides the named layers."""
