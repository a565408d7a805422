"""Recomputation of running samples' KV cache after a weight update.

Legend: N rows, P rows of one pass, L columns so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.interfaces import RolloutRequest
from dovetail_rollout_hf.cache import KvCache
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.pictures import pictures_of


def recompute(
    decoder: Decoder,
    cache: KvCache,
    ids_NL: Tensor,
    prompts: Sequence[tuple[int, RolloutRequest]],
    max_tokens: int,
) -> Tensor:
    """Compute anew the cached keys and values of prompts and unfinished responses, in place, and return the logits of the next tokens.

    Args:
        decoder: a decoder with the new weights.
        cache: the rows' keys and values [N, H, C, D], with C ≥ L, overwritten.
        ids_NL: int64 [N, L], each row's response tokens so far, right-aligned; the prompts' tokens are filled in from `prompts`.
        prompts: the number of left padding columns, and the request, of each row.
        max_tokens: the token limit of one pass, padding included; a pass has at least one row.

    Returns:
        float32 [N, V]: logits of each row's next token.
    """
    ids_NL = ids_NL.clone()
    for row, (pad, request) in enumerate(prompts):
        prompt_P = torch.from_numpy(request.prompt_ids).to(ids_NL.device)
        ids_NL[row, pad : pad + len(prompt_P)] = prompt_P
    columns = ids_NL.shape[1]
    at_once = max(max_tokens // columns, 1)
    logits = []
    for first in range(0, len(prompts), at_once):
        rows = slice(first, first + at_once)
        pads = [pad for pad, _ in prompts[rows]]
        pad_P = torch.tensor(pads, device=ids_NL.device) if any(pads) else None
        pictures = pictures_of([r for _, r in prompts[rows]], pads, columns, ids_NL.device)
        prefill = decoder.prefill(ids_NL[rows], pad_P, pictures)
        for layer in range(len(cache.keys)):
            cache.keys[layer][rows, :, :columns] = prefill.keys[layer]
            cache.values[layer][rows, :, :columns] = prefill.values[layer]
        logits.append(prefill.logits_PV)
    return torch.cat(logits)
