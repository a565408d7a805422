"""Scorer: a laid-out micro-batch through the model, and the scores of its tokens out.

Legend: B rows, G distinct prompts, L padded length, P padded prompt length, R scored tokens, T response tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from dovetail_train_fsdp2.architecture import plain_head, select_prompts, shares_prompts
from dovetail_train_fsdp2.head import score_tokens, scores_of_logits
from dovetail_train_fsdp2.packing import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADDITIVE_MASKS = frozenset({"sdpa", "eager"})
"""Attention implementations that take a mask to be added to the scores."""


class Scorer:
    """Runs one model. What it may do with the architecture is found out once, by trying."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self.device: torch.device = model.device
        self._base: nn.Module = model.base_model
        self._head = plain_head(model)
        self.can_share_prompts = self._head is not None and shares_prompts(model)

    def __call__(self, layout: Layout, outputs: frozenset[str]) -> dict[str, Float32[Tensor, "T"]]:
        """Score the micro-batch's tokens.

        Returns:
            float32 [T] for each output, aligned with the packed response tokens; masked tokens hold 0.
            They carry the gradient where gradients are enabled.
        """
        if not len(layout.token_R):
            return {name: torch.zeros(layout.tokens, device=self.device) for name in outputs}
        targets_R, source_R = self._tensor(layout.targets_R), self._tensor(layout.source_R)
        temperature_R = None if layout.temperature_R is None else self._tensor(layout.temperature_R)
        if self._head is None:
            scores = self._scores_of_any_head(layout, source_R, targets_R, temperature_R, outputs)
        else:
            with self._autocast():
                hidden_H = (
                    self._shared(layout) if layout.prompts_GP is not None else self._plain(layout)
                )
            scores = score_tokens(
                hidden_H.index_select(0, source_R),
                self._head.weight,
                self._head.bias,
                targets_R,
                temperature_R,
                outputs=outputs,
                dtype=self.dtype,
            )
        if len(layout.token_R) == layout.tokens:
            return scores
        token_R = self._tensor(layout.token_R)
        return {
            name: values_R.new_zeros(layout.tokens).index_copy(0, token_R, values_R)
            for name, values_R in scores.items()
        }

    def _plain(self, layout: Layout) -> Tensor:
        """Hidden states [B · L, H]. Padding is on the right, so that causal attention needs no mask."""
        output = self._base(input_ids=self._tensor(layout.ids_BL), use_cache=False)
        return _flat(output.last_hidden_state)

    def _shared(self, layout: Layout) -> Tensor:
        """Hidden states [G · P + B · L, H]: of the prompts, then of the responses, which attend to their prompt."""
        from transformers import DynamicCache

        assert layout.prompts_GP is not None
        cache = DynamicCache(config=self.model.config)
        prompts_GP = self._tensor(layout.prompts_GP)
        of_prompts = self._base(input_ids=prompts_GP, past_key_values=cache, use_cache=True)
        if not layout.ids_BL.shape[1]:
            return _flat(of_prompts.last_hidden_state)
        select_prompts(cache, self._tensor(layout.prompt_of_B))
        ids_BL = self._tensor(layout.ids_BL)
        lengths_B1 = self._tensor(layout.prompt_lengths_B)[:, None]
        of_responses = self._base(
            input_ids=ids_BL,
            attention_mask=self._mask(layout, lengths_B1),
            position_ids=lengths_B1 + torch.arange(ids_BL.shape[1], device=self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat(
            [_flat(of_prompts.last_hidden_state), _flat(of_responses.last_hidden_state)]
        )

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

    def _scores_of_any_head(
        self,
        layout: Layout,
        source_R: Tensor,
        targets_R: Tensor,
        temperature_R: Tensor | None,
        outputs: frozenset[str],
    ) -> dict[str, Tensor]:
        """Through the model's own output: for architectures that do more than one matrix product there."""
        with self._autocast():
            output = self.model(input_ids=self._tensor(layout.ids_BL), use_cache=False)
        logits_RV = _flat(output.logits).index_select(0, source_R)
        if temperature_R is not None:
            logits_RV = logits_RV.float() / temperature_R[:, None]
        return scores_of_logits(logits_RV, targets_R, outputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _flat(states_BLH: Tensor) -> Tensor:
    return states_BLH.reshape(-1, states_BLH.shape[-1])
