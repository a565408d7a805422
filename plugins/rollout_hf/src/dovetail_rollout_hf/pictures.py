"""Images of the prompts of one pass. Legend: P rows of the pass, L columns."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from dovetail.interfaces import MediaRef, RolloutRequest


@attrs.frozen(eq=False)
class RowImages:
    """The images of a pass's rows, and the positions of their prompts."""

    media: tuple[tuple[MediaRef, ...], ...]
    """Images of each row."""
    prompt_PL: Tensor
    """bool [P, L]: True on tokens of prompts."""


def pictures_of(
    requests: Sequence[RolloutRequest], pads: Sequence[int], columns: int, device: torch.device
) -> RowImages | None:
    """Return the images of these rows; None where they have none.

    Args:
        requests: one a row.
        pads: padding columns on the left of each row's prompt.
        columns: L.
        device: the device of the pass.
    """
    if not any(request.media for request in requests):
        return None
    starts_P1 = torch.tensor(pads, device=device)[:, None]
    lengths_P1 = torch.tensor([len(r.prompt_ids) for r in requests], device=device)[:, None]
    columns_L = torch.arange(columns, device=device)
    prompt_PL = (columns_L >= starts_P1) & (columns_L < starts_P1 + lengths_P1)
    return RowImages(tuple(request.media for request in requests), prompt_PL)
