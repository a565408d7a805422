"""PlannedAdapter: what a config tells of an adapter that is to be trained, before anything is loaded. Nothing here imports torch."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class PlannedAdapter:
    """A low-rank adapter (arXiv 2106.09685) as a training engine's config describes it."""

    rank: int | None = None
    """Rows of A and columns of B; None where it is not known."""
    dora: bool = False
    """Whether magnitudes of the weights' rows are learnt and travel too (arXiv 2402.09353)."""
    base: Literal["nf4"] | None = None
    """The form that linear layers below it are kept in: 4 bits, or in full."""
    target_modules: tuple[str, ...] = ()
    """Layers that the config names, such as `q_proj`; none where it leaves them to the engine."""
    excluded: str | None = None
    """Regular expression on whole names of layers that are left out."""
    all_linear: bool = False
    """Whether every linear layer but the output layer is adapted, besides those that are named."""
