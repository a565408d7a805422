"""The general decoder: runs any transformers model whose only state is keys and values, over preallocated columns.

Legend: N rows, P prompts, L prompt columns, H key and value heads, D head width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dovetail_datasets import produced_placeholders
from dovetail_rollout_hf.cache import KvCache, Prefill
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.pictures import RowImages


class _ColumnLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that writes one column of a preallocated tensor and returns the columns so far."""

    def __init__(self, keys_NHCD: Tensor, values_NHCD: Tensor) -> None:
        super().__init__()
        self._keys_NHCD, self._values_NHCD = keys_NHCD, values_NHCD
        self.dtype, self.device = keys_NHCD.dtype, keys_NHCD.device
        self.is_initialized = True

    def at(self, column: int) -> None:
        """Set the column of the next token."""
        self._column = column
        self.keys = self._keys_NHCD[:, :, :column]
        self.values = self._values_NHCD[:, :, :column]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        self._keys_NHCD[:, :, self._column] = key_states[:, :, 0]
        self._values_NHCD[:, :, self._column] = value_states[:, :, 0]
        self.keys = self._keys_NHCD[:, :, : self._column + 1]
        self.values = self._values_NHCD[:, :, : self._column + 1]
        return self.keys, self.values


class TransformersDecoder(Decoder):
    """Decoder that calls the transformers model's own forward pass."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        self._extra: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepted:
            self._extra["logits_to_keep"] = 1
        # Such models compute positions themselves: by row and column within an image, and shifted for the text after it.
        self._numbers_images = hasattr(model.base_model, "get_rope_index")
        self._past: Any = None
        self._pad_N: Tensor | None = None
        self._shift_N: Tensor | None = None
        self._mask_NC: Tensor | None = None

    def prefill(
        self, ids_PL: Tensor, pad_P: Tensor | None, pictures: RowImages | None = None
    ) -> Prefill:
        columns_L = torch.arange(ids_PL.shape[1], device=ids_PL.device)
        mask_PL = positions_PL = None
        if pad_P is not None:
            mask_PL = (columns_L >= pad_P[:, None]).long()
            positions_PL = (columns_L - pad_P[:, None]).clamp_(min=0)
        past = DynamicCache()
        fixed: dict[str, Any] = {"attention_mask": mask_PL, "past_key_values": past, **self._extra}
        if pictures is None:
            output = self._model(input_ids=ids_PL, position_ids=positions_PL, **fixed)
        else:
            output = self._with_images(ids_PL, positions_PL, pictures, fixed)
        keys, values = (
            [getattr(layer, side) for layer in past.layers] for side in ("keys", "values")
        )
        moved = pictures is not None and self._numbers_images
        return Prefill(
            output.logits[:, -1].float(),
            keys,
            values,
            output.rope_deltas.reshape(-1).long() if moved else None,
        )

    def _with_images(
        self,
        ids_PL: Tensor,
        positions_PL: Tensor | None,
        pictures: RowImages,
        fixed: dict[str, Any],
    ) -> Any:
        """Return the model's output for prompts with images.

        Args:
            ids_PL: int64 [P, L], the prompts' token ids, right-aligned.
            positions_PL: int64 [P, L], the position ids; None without padding. Unused if the model computes its own.
            pictures: the prompts' images.
            fixed: further arguments of the model's forward pass.
        """
        assert self.images is not None
        images, prompt_PL = self.images, pictures.prompt_PL
        inputs: dict[str, Any] = dict(images.of(ids_PL, prompt_PL, pictures.media))
        if not self._numbers_images:
            inputs["position_ids"] = positions_PL
        with produced_placeholders(self._model, ids_PL, prompt_PL, images.image_token) as given_PL:
            return self._model(input_ids=given_PL, **inputs, **fixed)

    def begin(self, cache: KvCache, pad_N: Tensor | None, shift_N: Tensor | None = None) -> None:
        self._past = DynamicCache()
        self._past.layers = [
            _ColumnLayer(k, v) for k, v in zip(cache.keys, cache.values, strict=True)
        ]
        self._pad_N, self._shift_N = pad_N, shift_N
        if pad_N is not None:
            columns_C = torch.arange(cache.keys[0].shape[2], device=pad_N.device)
            self._mask_NC = (columns_C >= pad_N[:, None]).long()

    def step(self, tokens_N: Tensor, column: int) -> Tensor:
        for layer in self._past.layers:
            layer.at(column)
        mask_NT: Tensor | None = None
        if self._pad_N is None:
            positions_N1 = torch.full((len(tokens_N), 1), column, device=tokens_N.device)
        else:
            positions_N1 = (column - self._pad_N).unsqueeze(1)
            mask_NT = None if self._mask_NC is None else self._mask_NC[:, : column + 1]
        if self._shift_N is not None:
            positions_N1 = positions_N1 + self._shift_N.unsqueeze(1)
        output = self._model(
            input_ids=tokens_N.unsqueeze(1),
            attention_mask=mask_NT,
            position_ids=positions_N1,
            past_key_values=self._past,
            **self._extra,
        )
        return output.logits[:, -1].float()
