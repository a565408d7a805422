"""Tests of the optimisations that an architecture allows, made by running a few tokens rather than by a list of names; and the cost of
attention.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_logger = logging.getLogger(__name__)
_TOKENS = 4
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError)
"""Exceptions of an architecture that does not accept a cache or an argument."""


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether logits are exactly the output layer's product with the base model's last hidden states.

    False for architectures that scale or cap their logits, or have no output layer.
    """
    head, base = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or base is model:
        return False
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((args[0], output, output.clone()))

    handle = head.register_forward_hook(note)
    try:
        ids = _ids(model)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    states = getattr(base(input_ids=ids, use_cache=False), "last_hidden_state", None)
    if len(seen) != 1 or states is None:
        return False
    given, raw, copy = seen[0]
    # The logits must be the tensor that the layer returned, unchanged: softcapping would hardly change a random model's values.
    untouched = logits.data_ptr() == raw.data_ptr() and torch.equal(logits, copy)
    return untouched and torch.equal(given, states)


@torch.no_grad()
def shares_prompts(model: PreTrainedModel) -> bool:
    """Return whether several responses can attend to one prompt's cached keys and values.

    True if every layer caches plain keys and values: no sliding window, no recurrent state.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    base, ids = model.base_model, _ids(model)
    half = _TOKENS // 2
    try:
        whole = base(input_ids=ids, use_cache=False).last_hidden_state
        cache = DynamicCache(config=model.config)
        base(input_ids=ids[:, :half], past_key_values=cache, use_cache=True)
        if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return False
        select_prompts(cache, torch.zeros(2, dtype=torch.int64, device=ids.device))
        rest = base(
            input_ids=ids[:, half:].expand(2, -1),
            position_ids=torch.arange(half, _TOKENS, device=ids.device).expand(2, -1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    except _FAILURES as error:
        _logger.info(
            "each prompt is computed anew for each of its responses, because the model can't compute it once for all of them: %s",
            error,
        )
        return False
    scale = float(whole.abs().max())
    if not math.isfinite(scale):
        return False  # non-finite weights, which the first step reports
    return torch.allclose(rest, whole[:, half:].expand_as(rest), rtol=0, atol=1e-3 * scale)


def quadratic(trunk: PreTrainedModel) -> float:
    """Return q in the relative cost n · (1 + q · n) of a sample of n tokens.

    q = F · H · D / N, for a model of N parameters with F layers, each with H heads of size D. A token takes 2 N operations without
    attention. Attention to one other token adds 4 · H · D operations in each layer, and a token attends to n / 2 tokens on average.
    """
    config = trunk.config.get_text_config()
    layers, heads = (
        getattr(config, "num_hidden_layers", 0),
        getattr(config, "num_attention_heads", 0),
    )
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    parameters = sum(parameter.numel() for parameter in trunk.parameters())
    return float(layers * heads * size / max(1, parameters))


def select_prompts(cache: Any, prompt_of_B: Tensor) -> None:
    """Expand the cache of prompts to one row per response: row b gets the keys and values of prompt `prompt_of_B[b]`. Differentiable."""
    for layer in cache.layers:
        layer.keys = layer.keys.index_select(0, prompt_of_B)
        layer.values = layer.values.index_select(0, prompt_of_B)


def _ids(model: PreTrainedModel) -> Tensor:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(_TOKENS, device=model.device) % vocabulary
    return ids[None]
