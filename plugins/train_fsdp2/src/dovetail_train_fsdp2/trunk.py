"""Trunk: the model without its head, which computes hidden states of laid-out micro-batches.

Legend: B rows, G distinct prompts, L padded length, P padded prompt length, R scored tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dovetail_datasets import produced_placeholders
from dovetail_torch_engines import Sequences, sent
from dovetail_train_fsdp2.architecture import select_prompts
from dovetail_train_fsdp2.attention import PACKED, AttentionPack, attend_by, make_known
from dovetail_train_fsdp2.layout import MicroBatchLayout, PackedSequences, Padded, Shared
from dovetail_train_fsdp2.vision import vision_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.forward import ModelRunner

ADDITIVE_MASKS = frozenset({"sdpa", "eager"})
"""Attention implementations that take an additive mask."""


class Trunk:
    """Computes the hidden states of a runner's model, without the model's head, in the compute dtype."""

    def __init__(self, runner: ModelRunner) -> None:
        make_known()
        self._runner = runner
        self._own_attention: str = runner.trunk.config._attn_implementation  # noqa: SLF001 - no public name

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model without a value head: a language model, or the base of a value model."""
        return self._runner.trunk

    @property
    def device(self) -> torch.device:
        """The device of computation."""
        return self._runner.device

    def states(self, layout: MicroBatchLayout) -> Tensor:
        """Return the last hidden states, flattened: [B · L, H] (padded), [G · P + B · L, H] (shared) or [F, H] (packed)."""
        with self.autocast():
            if isinstance(layout.fed, Shared):
                return self._shared(layout.fed)
            with self.inputs(layout.fed) as inputs:
                output = self.model.base_model(use_cache=False, **inputs)
            return self.owing_vision(flat(output.last_hidden_state))

    def owing_vision(self, output: Tensor) -> Tensor:
        """Return an output, of any shape, whose backward pass also gives the vision tower gradients of 0 if some rank has images.

        Ranks reduce the tower's gradients together, so a rank without an image must contribute zeros. The values are unchanged.
        """
        if not (self._runner.vision_everywhere and torch.is_grad_enabled()):
            return output
        trained = (p for p in vision_parameters(self.model) if p.requires_grad)
        return output + sum(0 * p.reshape(-1)[0].to(output.dtype) for p in trained)

    @contextmanager
    def inputs(self, fed: Padded | PackedSequences) -> Iterator[dict[str, Any]]:
        """Set the model's attention function, and yield the model's keyword arguments.

        Padded: ids [B, L] and inputs of images. Packed: ids [1, F], positions [1, F] and an `AttentionPack`.
        """
        if isinstance(fed, PackedSequences):
            yield self._packed(fed)
            return
        attend_by(self.model, self._own_attention)
        ids_BL = self.tensor(fed.ids_BL)
        if fed.images is None:
            # Padding is on the right, so that causal attention needs no mask.
            yield {"input_ids": ids_BL}
            return
        images = self._runner.images()
        shown_BL = self.tensor(fed.images.shown_BL)
        inputs = images.of(ids_BL, shown_BL, fed.images.media_B)
        with produced_placeholders(self.model, ids_BL, shown_BL, images.image_token) as given_BL:
            yield {"input_ids": given_BL, **inputs}

    def _packed(self, fed: PackedSequences) -> dict[str, Any]:
        attend_by(self.model, PACKED)
        return {
            "input_ids": self.tensor(fed.ids_F)[None],
            "position_ids": self.tensor(fed.positions_F)[None],
            "pack": self._pack(fed),
        }

    def _pack(self, fed: PackedSequences) -> AttentionPack:
        sequences = Sequences(fed.lengths_S.tolist(), self.device)
        parallel = self._runner.parallel
        if fed.responses_G is None:
            return AttentionPack(sequences=sequences, parallel=parallel)
        prompts = fed.lengths_S[: len(fed.responses_G)].tolist()
        return AttentionPack(
            sequences=sequences,
            prompts=Sequences(prompts, self.device),
            responses=Sequences(fed.responses_G.tolist(), self.device),
            parallel=parallel,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast to the compute dtype; without effect if the weights are sharded, since they are gathered in that dtype."""
        dtype = self._runner.dtype
        enabled = dtype != torch.float32 and not self._runner.sharded
        return torch.autocast(self.device.type, dtype=dtype, enabled=enabled)

    def tensor(self, array: np.ndarray) -> Tensor:
        """Copy an array to the model's device, as a tensor of the same shape and dtype."""
        return sent(array, self.device)

    def _shared(self, fed: Shared) -> Tensor:
        """Return hidden states [G · P + B · L, H] of the prompts, then of the responses, which attend to their prompt."""
        from transformers import DynamicCache

        attend_by(self.model, self._own_attention)
        base = self.model.base_model
        cache = DynamicCache(config=self.model.config)
        prompts_GP = self.tensor(fed.prompts_GP)
        of_prompts = base(input_ids=prompts_GP, past_key_values=cache, use_cache=True)
        if not fed.ids_BL.shape[1]:
            return flat(of_prompts.last_hidden_state)
        select_prompts(cache, self.tensor(fed.prompt_of_B))
        ids_BL = self.tensor(fed.ids_BL)
        lengths_B1 = self.tensor(fed.prompt_lengths_B)[:, None]
        of_responses = base(
            input_ids=ids_BL,
            attention_mask=self._mask(fed, lengths_B1),
            position_ids=lengths_B1 + torch.arange(ids_BL.shape[1], device=self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat([flat(of_prompts.last_hidden_state), flat(of_responses.last_hidden_state)])

    def _mask(self, fed: Shared, lengths_B1: Tensor) -> Tensor | None:
        """Return the mask by which responses attend to their prompt, and causally to themselves.

        If the attention implementation is in `ADDITIVE_MASKS`, the mask is added to the attention scores, [B or 1, 1, L, P + L]. For any
        other it is int64 [B, P + L] with 0 on the padding between prompt and response, or None if no prompt is padded.

        Args:
            fed: the prompts and responses.
            lengths_B1: int64 [B, 1], number of tokens of each row's prompt.
        """
        prompt_length, length = fed.prompts_GP.shape[1], fed.ids_BL.shape[1]
        padded = bool(np.any(fed.prompt_lengths_B != prompt_length))
        prompt_BP = (
            torch.arange(prompt_length, device=self.device) < lengths_B1[: None if padded else 1]
        )
        if self._own_attention not in ADDITIVE_MASKS:
            response_BL = prompt_BP.new_ones(len(prompt_BP), length)
            return torch.cat([prompt_BP, response_BL], dim=1).long() if padded else None
        causal_LL = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        rows = (len(prompt_BP), 1, length)
        allowed = torch.cat(
            [
                prompt_BP[:, None, None].expand(*rows, prompt_length),
                causal_LL.expand(*rows, length),
            ],
            dim=-1,
        )
        lowest = torch.finfo(self._runner.dtype).min
        return torch.zeros(
            allowed.shape, dtype=self._runner.dtype, device=self.device
        ).masked_fill_(~allowed, lowest)


def flat(states_BLH: Tensor) -> Tensor:
    """Return hidden states [B, L, H] as [B · L, H]."""
    return states_BLH.reshape(-1, states_BLH.shape[-1])
