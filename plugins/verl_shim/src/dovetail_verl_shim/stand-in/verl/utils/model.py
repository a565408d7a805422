"""Position ids of tokens."""

from __future__ import annotations

from typing import Any


def compute_position_id_with_mask(mask: Any) -> Any:
    """Return each token's position among the tokens with mask 1, from 0; shaped as the mask, [..., T]."""
    return (mask.cumsum(-1) - 1).clip(min=0)
