"""The reference for updates: the tests' objective, computed by transformers and torch only."""

from __future__ import annotations

import numpy as np
import torch


def loss_of(model, batch):
    """The objective's loss by transformers and torch alone, every sample by itself, and the scores by name."""
    scores = {"log_probs": [], "entropies": [], "sum_pi_squared": []}
    rows = zip(batch["prompt_ids"], batch["response_ids"], batch["temperature"], strict=True)
    for prompt, response, temperature in rows:
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / float(temperature)
        log_pi = logits.log_softmax(-1)
        pi = log_pi.exp()
        chosen = log_pi.gather(-1, torch.from_numpy(response)[:, None])[:, 0]
        scores["log_probs"].append(chosen)
        scores["entropies"].append(-(pi * log_pi).sum(-1))
        scores["sum_pi_squared"].append(pi.square().sum(-1))
    mask = torch.from_numpy(batch["response_mask"].values)
    found = {name: torch.cat(parts) * mask for name, parts in scores.items()}
    advantages = torch.from_numpy(batch["advantages"])[
        torch.from_numpy(batch["response_mask"].row_index)
    ]
    kl = (found["log_probs"] - torch.from_numpy(batch["ref_log_probs"].values)).square() / 2
    tokens = -advantages * found["log_probs"] + 0.1 * kl - 0.01 * found["entropies"]
    return (tokens * mask).sum() / mask.sum(), found
