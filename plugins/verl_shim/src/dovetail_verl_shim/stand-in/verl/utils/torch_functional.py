"""A function that pads or cuts tokenised prompts to one length."""

from __future__ import annotations

from typing import Any


def postprocess_data(
    input_ids: Any,
    attention_mask: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Any, Any]:
    """Pad or cut token ids and their attention mask, [B, T] each, to [B, max_length], and return both.

    Args:
        input_ids: the token ids.
        attention_mask: the mask, which is 0 on padding.
        max_length: the length of the results.
        pad_token_id: the token id of the padding.
        left_pad: whether to pad on the left rather than on the right.
        truncation: where to remove tokens if there are too many: `left`, `right` or `middle`; any other value raises an error.

    Raises:
        ValueError: there are more than `max_length` tokens, and `truncation` is neither `left`, `right` nor `middle`.
    """
    import torch

    length = input_ids.shape[-1]
    if length < max_length:
        pad = (max_length - length, 0) if left_pad else (0, max_length - length)
        padded = torch.nn.functional.pad(input_ids, pad, value=pad_token_id)
        return padded, torch.nn.functional.pad(attention_mask, pad, value=0)
    before = {"left": 0, "right": max_length, "middle": max_length // 2}.get(truncation)
    if before is None and length > max_length:
        raise ValueError(
            f"there are {length} tokens; expected at most {max_length}, since truncation is {truncation!r}"
        )
    before = before or 0
    places = [*range(before), *range(length - max_length + before, length)]
    return input_ids[..., places], attention_mask[..., places]
