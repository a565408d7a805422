"""The fused decoder for Llama, Qwen2 and Qwen3, with fused projections and in-place writes to the KV cache.

Legend: N rows, P prompts, L prompt columns, T columns so far, C columns, A query heads, H key and value heads, G query heads per
key head, D head width, E hidden width, F MLP width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail_rollout_hf.cache import KvCache, Prefill
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.pictures import RowImages

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""


def why_not_fused(model: Any) -> str | None:
    """Return why the fused decoder does not support a model; None if it does."""
    config, kind = model.config, type(model).__name__
    if kind not in _ARCHITECTURES or not type(model).__module__.startswith("transformers.models."):
        return f"{kind} is not one of {', '.join(_ARCHITECTURES)}"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "some of its layers do not use full attention"
    rotary = model.model.rotary_emb.rope_type
    if rotary not in _ROTARY:
        return f"its rotary embedding {rotary!r} depends on the length of the sequence"
    return None


class _Layer:
    """One block's fused weights. The model's own weights become views of them, so that loading the model fills the fused weights."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.qkv_weight, self.qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up_weight, self.gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
        self.attention_norm, self.mlp_norm = block.input_layernorm, block.post_attention_layernorm
        self.output, self.down = attention.o_proj, mlp.down_proj
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)


class FusedDecoder(Decoder):
    """Decoder for the Llama family with a forward pass reduced to what decoding needs."""

    name = "fused"

    def __init__(self, model: Any) -> None:
        self._model = model
        config = model.config
        self._A, self._H = config.num_attention_heads, config.num_key_value_heads
        self._D = getattr(config, "head_dim", None) or config.hidden_size // self._A
        self._G = self._A // self._H
        self._F = config.intermediate_size
        self._eps = config.rms_norm_eps
        self._scale = self._D**-0.5
        self._cache = KvCache()
        self._pad_N: Tensor | None = None
        self._bias_B1C: Tensor | None = None
        self.moved()

    def moved(self) -> None:
        self._layers = [_Layer(block) for block in self._model.model.layers]
        self._dtype, self._device = self._model.dtype, self._model.device
        self._cos_CD = self._sin_CD = torch.empty(0, self._D, device=self._device)

    def prefill(
        self, ids_PL: Tensor, pad_P: Tensor | None, pictures: RowImages | None = None
    ) -> Prefill:
        # No architecture of this decoder takes images.
        P, L = ids_PL.shape
        self._rotary_until(L)
        columns_L = torch.arange(L, device=self._device)
        mask_P1LL = None
        if pad_P is None:
            cos, sin = self._cos_CD[None, :L, None], self._sin_CD[None, :L, None]
        else:
            positions_PL = (columns_L - pad_P[:, None]).clamp_(min=0)
            cos = self._cos_CD[positions_PL].unsqueeze(2)
            sin = self._sin_CD[positions_PL].unsqueeze(2)
            seen_PLL = (columns_L <= columns_L[:, None]) & (columns_L >= pad_P[:, None, None])
            # Padding attends to itself: softmax over no keys would be NaN.
            seen_PLL |= torch.eye(L, dtype=torch.bool, device=self._device)
            mask_P1LL = seen_PLL[:, None]
        hidden_TE = functional.embedding(ids_PL, self._model.model.embed_tokens.weight)
        hidden_TE = hidden_TE.reshape(P * L, -1)
        keys, values = [], []
        for layer in self._layers:
            qk, v_TE = self._project(layer, hidden_TE)
            qk = self._rotate(qk.view(P, L, self._A + self._H, self._D), cos, sin).transpose(1, 2)
            q_PALD, k_PHLD = qk[:, : self._A], qk[:, self._A :]
            v_PHLD = v_TE.view(P, L, self._H, self._D).transpose(1, 2)
            keys.append(k_PHLD)
            values.append(v_PHLD)
            mixed_PALD = functional.scaled_dot_product_attention(
                q_PALD,
                k_PHLD.repeat_interleave(self._G, 1),
                v_PHLD.repeat_interleave(self._G, 1),
                attn_mask=mask_P1LL,
                is_causal=mask_P1LL is None,
                scale=self._scale,
            )
            hidden_TE = self._finish(
                layer, hidden_TE, mixed_PALD.transpose(1, 2).reshape(P * L, -1)
            )
        return Prefill(self._logits(hidden_TE.view(P, L, -1)[:, -1]), keys, values)

    def begin(self, cache: KvCache, pad_N: Tensor | None, shift_N: Tensor | None = None) -> None:
        self._cache, self._pad_N = cache, pad_N
        N, _, C, _ = cache.keys[0].shape
        self._rotary_until(C)
        self._bias_B1C = None
        if pad_N is not None:
            hidden_NC = torch.arange(C, device=self._device) < pad_N[:, None]
            bias_NC = torch.zeros((N, C), dtype=self._dtype, device=self._device)
            bias_NC.masked_fill_(hidden_NC, -torch.inf)
            self._bias_B1C = bias_NC.repeat_interleave(self._H, 0).unsqueeze(1)

    def step(self, tokens_N: Tensor, column: int) -> Tensor:
        N, A, H, D = len(tokens_N), self._A, self._H, self._D
        T = column + 1
        if self._pad_N is None:
            cos, sin = self._cos_CD[column], self._sin_CD[column]
        else:
            positions_N = column - self._pad_N
            cos = self._cos_CD[positions_N].unsqueeze(1)
            sin = self._sin_CD[positions_N].unsqueeze(1)
        bias_B1T = None if self._bias_B1C is None else self._bias_B1C[:, :, :T]
        hidden_NE = functional.embedding(tokens_N, self._model.model.embed_tokens.weight)
        for index, layer in enumerate(self._layers):
            qk, v_NE = self._project(layer, hidden_NE)
            qk = self._rotate(qk.view(N, A + H, D), cos, sin)
            keys_NHCD, values_NHCD = self._cache.keys[index], self._cache.values[index]
            keys_NHCD[:, :, column] = qk[:, A:]
            values_NHCD[:, :, column] = v_NE.view(N, H, D)
            q_BGD = qk[:, :A].reshape(N * H, self._G, D)
            keys_BDT = keys_NHCD.view(N * H, -1, D)[:, :T].transpose(1, 2)
            if bias_B1T is None:
                scores_BGT = torch.bmm(q_BGD, keys_BDT).mul_(self._scale)
            else:
                scores_BGT = torch.baddbmm(bias_B1T, q_BGD, keys_BDT, alpha=self._scale)
            weights_BGT = torch.softmax(scores_BGT, -1)
            mixed_BGD = torch.bmm(weights_BGT, values_NHCD.view(N * H, -1, D)[:, :T])
            hidden_NE = self._finish(layer, hidden_NE, mixed_BGD.view(N, A * D))
        return self._logits(hidden_NE)

    def _project(self, layer: _Layer, hidden_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [T, (A + H) * D], normalised if the model does so, and values [T, H * D]."""
        normed_TE = self._norm(hidden_TE, layer.attention_norm)
        qkv = functional.linear(normed_TE, layer.qkv_weight, layer.qkv_bias)
        split = (self._A + self._H) * self._D
        qk, v_TE = qkv[:, :split], qkv[:, split:]
        if layer.q_norm is not None:
            heads = qk.view(-1, self._A + self._H, self._D)
            q = self._norm(heads[:, : self._A], layer.q_norm)
            k = self._norm(heads[:, self._A :], layer.k_norm)
            qk = torch.cat((q, k), 1).flatten(1)
        return qk, v_TE

    def _finish(self, layer: _Layer, hidden_TE: Tensor, mixed_TE: Tensor) -> Tensor:
        """Compute the rest of a block: add output projection and MLP to the residual stream."""
        hidden_TE = _add_linear(hidden_TE, mixed_TE, layer.output)
        normed_TE = self._norm(hidden_TE, layer.mlp_norm)
        gate_up = functional.linear(normed_TE, layer.gate_up_weight, layer.gate_up_bias)
        gated_TF = functional.silu(gate_up[:, : self._F]).mul_(gate_up[:, self._F :])
        return _add_linear(hidden_TE, gated_TF, layer.down)

    def _logits(self, hidden_NE: Tensor) -> Tensor:
        head = self._model.lm_head
        normed_NE = self._norm(hidden_NE, self._model.model.norm)
        return functional.linear(normed_NE, head.weight, head.bias).float()

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), norm.weight, self._eps)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary position embeddings to [..., heads, D]. Since the sine table has the signs of `rotate_half`, a roll suffices."""
        return torch.addcmul(x * cos, torch.roll(x, self._D // 2, -1), sin)

    def _rotary_until(self, columns: int) -> None:
        """Make the rotary tables [C, D] cover positions below `columns`."""
        if len(self._cos_CD) >= columns:
            return
        size = max(256, 1 << (columns - 1).bit_length())
        rotary = self._model.model.rotary_emb
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        cos, sin = rotary(like, torch.arange(size, device=self._device)[None])
        sign_D = torch.ones(self._D, dtype=self._dtype, device=self._device)
        sign_D[: self._D // 2] = -1
        self._cos_CD, self._sin_CD = cos[0], sin[0] * sign_D


def _fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Stack the rows of several linear layers, and make each layer's weight a view of the stack."""
    weight = torch.cat([linear.weight.data for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.data for b in biases])
    row = 0
    for linear in linears:
        rows = slice(row, row + linear.out_features)
        linear.weight.data = weight[rows]
        if bias is not None:
            linear.bias.data = bias[rows]
        row = rows.stop
    return weight, bias


def _add_linear(residual_TE: Tensor, x: Tensor, linear: nn.Linear) -> Tensor:
    """Add the layer's output to the residual, in one kernel and in place."""
    residual_TE.addmm_(x, linear.weight.t())
    return residual_TE if linear.bias is None else residual_TE.add_(linear.bias)
