"""What runs the model: the Decoder interface.

Legend: N rows, P prompts, L prompt columns, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dovetail_datasets import ImageInputs
from dovetail_rollout_hf.cache import KvCache, Prefill
from dovetail_rollout_hf.pictures import RowImages


class Decoder(ABC):
    """Runs a causal language model over left-padded prompts, then one column at a time."""

    name: str
    images: ImageInputs | None = None
    """The converter of images to the model's inputs; None until a prompt has an image."""

    @abstractmethod
    def prefill(
        self, ids_PL: Tensor, pad_P: Tensor | None, pictures: RowImages | None = None
    ) -> Prefill:
        """Run whole prompts.

        Args:
            ids_PL: int64 [P, L], right-aligned.
            pad_P: int64 [P], padding columns on the left; None where no prompt has any.
            pictures: the prompts' images; None where no prompt has any.
        """

    @abstractmethod
    def begin(self, cache: KvCache, pad_N: Tensor | None, shift_N: Tensor | None = None) -> None:
        """Get ready to step over these rows; called whenever the rows or columns have changed.

        Args:
            cache: the rows' keys and values.
            pad_N: int64 [N], padding columns on the left; None where no row has any.
            shift_N: int64 [N], what is added to the positions of the next tokens; None where nothing is.
        """

    @abstractmethod
    def step(self, tokens_N: Tensor, column: int) -> Tensor:
        """Run one token a row, int64 [N], at `column`; returns float32 logits [N, V]."""

    def moved(self) -> None:
        """Record that the model's weights were moved to another address or device."""
