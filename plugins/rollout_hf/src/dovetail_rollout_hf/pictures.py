"""Images of the prompts in one forward pass. Legend: P rows of the pass, L columns."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from dovetail.interfaces import MediaRef, RolloutRequest


@attrs.frozen(eq=False)
class RowImages:
    """The images of the rows of one forward pass, and the positions of the rows' prompts."""

    media: tuple[tuple[MediaRef, ...], ...]
    """References to the images of each row."""
    prompt_PL: Tensor
    """bool [P, L]: True at tokens of prompts."""


def pictures_of(
    requests: Sequence[RolloutRequest], pads: Sequence[int], columns: int, device: torch.device
) -> RowImages | None:
    """Return the images of the requests' prompts; None if no prompt has images.

    Args:
        requests: the request of each row.
        pads: the number of padding columns on the left of each row.
        columns: L, the number of columns.
        device: the device of the forward pass.
    """
    if not any(request.media for request in requests):
        return None
    starts_P1 = torch.tensor(pads, device=device)[:, None]
    lengths_P1 = torch.tensor([len(r.prompt_ids) for r in requests], device=device)[:, None]
    columns_L = torch.arange(columns, device=device)
    prompt_PL = (columns_L >= starts_P1) & (columns_L < starts_P1 + lengths_P1)
    return RowImages(tuple(request.media for request in requests), prompt_PL)
