"""Position ids of tokens."""

from __future__ import annotations

from typing import Any


def compute_position_id_with_mask(mask: Any) -> Any:
    """Return the position of every token among those with mask 1, from 0; a tensor with the shape of the mask, [..., T]."""
    return (mask.cumsum(-1) - 1).clip(min=0)
