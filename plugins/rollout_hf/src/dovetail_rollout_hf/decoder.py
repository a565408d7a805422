"""Decoder: the interface for running a model in prefill passes and decoding steps.

Legend: N rows, P prompts, L prompt columns, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dovetail_datasets import ImageInputs
from dovetail_rollout_hf.cache import KvCache, Prefill
from dovetail_rollout_hf.pictures import RowImages


class Decoder(ABC):
    """Runs a causal language model: prefill of left-padded prompts, then decoding steps of one column of tokens."""

    name: str
    images: ImageInputs | None = None
    """The converter of images to the model's inputs; None until a prompt has an image."""

    @abstractmethod
    def prefill(
        self, ids_PL: Tensor, pad_P: Tensor | None, pictures: RowImages | None = None
    ) -> Prefill:
        """Compute the keys, values and last logits of whole prompts.

        Args:
            ids_PL: int64 [P, L], the prompts' token ids, right-aligned.
            pad_P: int64 [P], number of padding columns on the left; None if no prompt has padding.
            pictures: the prompts' images; None if no prompt has images.
        """

    @abstractmethod
    def begin(self, cache: KvCache, pad_N: Tensor | None, shift_N: Tensor | None = None) -> None:
        """Prepare decoding steps over the cache's rows; called whenever rows or columns have changed.

        Args:
            cache: the rows' keys and values.
            pad_N: int64 [N], number of padding columns on the left; None if no row has padding.
            shift_N: int64 [N], the offset of the next tokens' position ids; None if all are 0.
        """

    @abstractmethod
    def step(self, tokens_N: Tensor, column: int) -> Tensor:
        """Run one token per row, int64 [N], at `column`, and return float32 logits [N, V]."""

    def moved(self) -> None:
        """Update references to the model's weights after they moved to another address or device."""
