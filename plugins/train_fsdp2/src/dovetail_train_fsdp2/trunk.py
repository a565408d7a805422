"""Trunk: a laid-out micro-batch through a model's base, up to the hidden states.

Legend: B rows, G distinct prompts, L padded length, P padded prompt length, R scored tokens, H hidden size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dovetail_train_fsdp2.architecture import select_prompts
from dovetail_train_fsdp2.packing import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADDITIVE_MASKS = frozenset({"sdpa", "eager"})
"""Attention implementations that take a mask to be added to the scores."""


class Trunk:
    """Runs one model's base, in the compute dtype through autocast."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self.device: torch.device = model.device
        self._base: nn.Module = model.base_model

    def states(self, layout: Layout) -> Tensor:
        """The hidden states, flattened: [B · L, H] (plain), or [G · P + B · L, H] (shared)."""
        with self.autocast():
            return self._shared(layout) if layout.prompts_GP is not None else self._plain(layout)

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute in the compute dtype."""
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array as a tensor on the model's device."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _plain(self, layout: Layout) -> Tensor:
        """Hidden states [B · L, H]. Padding is on the right, so that causal attention needs no mask."""
        output = self._base(input_ids=self.tensor(layout.ids_BL), use_cache=False)
        return flat(output.last_hidden_state)

    def _shared(self, layout: Layout) -> Tensor:
        """Hidden states [G · P + B · L, H]: of the prompts, then of the responses, which attend to their prompt."""
        from transformers import DynamicCache

        assert layout.prompts_GP is not None
        cache = DynamicCache(config=self.model.config)
        prompts_GP = self.tensor(layout.prompts_GP)
        of_prompts = self._base(input_ids=prompts_GP, past_key_values=cache, use_cache=True)
        if not layout.ids_BL.shape[1]:
            return flat(of_prompts.last_hidden_state)
        select_prompts(cache, self.tensor(layout.prompt_of_B))
        ids_BL = self.tensor(layout.ids_BL)
        lengths_B1 = self.tensor(layout.prompt_lengths_B)[:, None]
        of_responses = self._base(
            input_ids=ids_BL,
            attention_mask=self._mask(layout, lengths_B1),
            position_ids=lengths_B1 + torch.arange(ids_BL.shape[1], device=self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat([flat(of_prompts.last_hidden_state), flat(of_responses.last_hidden_state)])

    def _mask(self, layout: Layout, lengths_B1: Tensor) -> Tensor | None:
        """What the responses attend to: the tokens of their prompt, and themselves up to each token.

        [B or 1, 1, L, P + L] to be added to the attention scores; for attention that takes no such mask,
        int64 [B, P + L] with 0 on the padding between prompt and response, or None where there is none.
        """
        assert layout.prompts_GP is not None
        prompt_length, length = layout.prompts_GP.shape[1], layout.ids_BL.shape[1]
        padded = bool(np.any(layout.prompt_lengths_B != prompt_length))
        prompt_BP = (
            torch.arange(prompt_length, device=self.device) < lengths_B1[: None if padded else 1]
        )
        if self.model.config._attn_implementation not in ADDITIVE_MASKS:  # noqa: SLF001 - no public name
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
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(allowed.shape, dtype=self.dtype, device=self.device).masked_fill_(
            ~allowed, lowest
        )


def flat(states_BLH: Tensor) -> Tensor:
    """[B, L, H] as [B · L, H]."""
    return states_BLH.reshape(-1, states_BLH.shape[-1])
