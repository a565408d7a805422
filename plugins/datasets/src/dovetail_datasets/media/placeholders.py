"""Keeps a model from treating placeholder tokens that the policy itself produced as images.

Legend: B sequences of L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def produced_placeholders(
    model: Any, ids_BL: Tensor, shown_BL: Tensor, token: int
) -> Iterator[Tensor]:
    """Make a model read image placeholder tokens as text if the policy produced them, since these have no images.

    Within the block the model gets another id in place of each such token, but embeds the token itself, as in generation.

    Args:
        model: the transformers model whose `forward` runs within the block.
        ids_BL: the token ids, int64 [B, L].
        shown_BL: a mask, bool [B, L], True where tokens may be image placeholders.
        token: the placeholder token.

    Yields:
        The ids to pass to the model, int64 [B, L].
    """
    produced_BL = (ids_BL == token) & ~shown_BL
    if not bool(produced_BL.any()):
        yield ids_BL
        return

    def true_ids(_: object, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        given = args[0] if args else None
        if not isinstance(given, Tensor) or given.shape != produced_BL.shape:
            return None
        return (given.masked_fill(produced_BL, token), *args[1:])

    handle = model.get_input_embeddings().register_forward_pre_hook(true_ids)
    try:
        yield ids_BL.masked_fill(produced_BL, 0 if token else 1)
    finally:
        handle.remove()
