"""Log-probabilities of given sequences under the model.

Legend: P sequences of one pass, L tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dovetail.errors import RequestRefusedError

_LOGITS_AT_ONCE = 1 << 26
"""Maximum number of logits in one pass, 256 MiB in float32; a single sequence may exceed it."""


def refuse_to_score(
    sequences: Sequence[np.ndarray], *, vocab_size: int, max_positions: int | None
) -> None:
    """Raise an error if a sequence, int64 [L], can't be scored.

    Raises:
        RequestRefusedError: a sequence is shorter than two tokens, longer than the model's limit, or has ids outside the vocabulary.
    """
    for number, ids_L in enumerate(sequences):
        problem = None
        if len(ids_L) < 2:
            problem = f"its number of tokens is {len(ids_L)}; expected 2 or more"
        elif ids_L.min() < 0 or ids_L.max() >= vocab_size:
            problem = f"it holds token ids outside 0 … {vocab_size - 1}"
        elif max_positions and len(ids_L) > max_positions:
            problem = f"its {len(ids_L)} tokens exceed the model's {max_positions} positions"
        if problem:
            raise RequestRefusedError(
                f"sequence {number} of {len(sequences)} can't be scored: {problem}"
            )


def score_tokens(model: Any, sequences: Sequence[np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """Return log-probabilities of sequences from plain forward passes. Only sequences of equal length are batched, without padding.

    Args:
        model: a transformers causal language model.
        sequences: the token ids of each sequence, int64 [L].
        vocab_size: V, the size of the vocabulary.

    Returns:
        float32 [L − 1] each, in nats: log-probabilities of every token but the first, given all preceding tokens.
    """
    by_length: dict[int, list[int]] = {}
    for number, ids_L in enumerate(sequences):
        by_length.setdefault(len(ids_L), []).append(number)
    found: dict[int, np.ndarray] = {}
    for length, numbers in by_length.items():
        at_once = max(_LOGITS_AT_ONCE // (length * vocab_size), 1)
        for first in range(0, len(numbers), at_once):
            chosen = numbers[first : first + at_once]
            ids_PL = torch.from_numpy(np.stack([sequences[number] for number in chosen]))
            found |= zip(chosen, _one_pass(model, ids_PL.to(model.device)), strict=True)
    return [found[number] for number in range(len(sequences))]


def _one_pass(model: Any, ids_PL: torch.Tensor) -> np.ndarray:
    """Return the log-probabilities of every token but the first, float32 [P, L − 1]."""
    logits_PLV = model(ids_PL, use_cache=False).logits[:, :-1].float()
    chosen_PL = logits_PLV.gather(-1, ids_PL[:, 1:, None])[..., 0]
    log_probs_PL = chosen_PL - logits_PLV.logsumexp(-1)
    return np.asarray(log_probs_PL.cpu().numpy())
