"""The oracle of supervised updates: the mean −log π of the trained tokens and its gradient, by transformers and torch alone, every sample by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dovetail.batch import Batch, Ragged
from dovetail.plugins import objective_spec

DESCENT = {"name": "sgd", "lr": 1024.0, "weight_decay": 0.0}
"""An optimizer whose step is the gradient, as long as it is not clipped, times a number that lifts it above the rounding of the weights."""


def conversations(vocabulary: int, seed: int = 0) -> Batch:
    """Samples of different lengths with several trained stretches each, one without any, and one of a token."""
    rng = np.random.default_rng(seed)
    lengths = [1, 7, 19, 4, 12, 2, 9]
    responses = Ragged.from_list([rng.integers(5, vocabulary, n) for n in lengths], dtype=np.int64)
    mask = rng.random(len(responses.values)) < 0.6
    mask[0], mask[responses.offsets[3] : responses.offsets[4]] = True, False
    prompts = [rng.integers(5, vocabulary, n) for n in (3, 1, 6, 2, 8, 1, 4)]
    return Batch(
        {
            "prompt_ids": Ragged.from_list(prompts, dtype=np.int64),
            "response_ids": responses,
            "response_mask": responses.with_values(mask),
            "temperature": np.ones(len(lengths), np.float32),
            "sample_id": [f"sample-{i}" for i in range(len(lengths))],
        }
    )


def plain_loss_and_gradient(path: Path, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by name, in float64."""
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float64).eval()
    losses = []
    rows = zip(batch["prompt_ids"], batch["response_ids"], batch["response_mask"], strict=True)
    for prompt, response, mask in rows:
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        log_pi = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = log_pi.gather(-1, torch.from_numpy(response)[:, None])[:, 0]
        losses.append(-chosen[torch.from_numpy(mask)].sum())
    loss = torch.stack(losses).sum() / int(batch["response_mask"].values.sum())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def assert_an_update_is_that_of_transformers(
    group, path: Path, directory: Path, batch: Batch
) -> None:
    """See that loss, norm and gradient of an update by `DESCENT` are the oracle's to 1e-5, in float32."""
    loss, expected = plain_loss_and_gradient(path, batch)
    metrics = group.update(batch, objective_spec("nll")).result()
    assert abs(metrics["actor/loss"].value - loss) <= 1e-5 * loss
    group.export(directory).result()
    after = load_file(directory / "model.safetensors")
    before = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).state_dict()
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    assert abs(metrics["actor/grad_norm"].value - total) <= 1e-5 * total
    for name, gradient in expected.items():
        found = (before[name].double() - after[name].double()) / DESCENT["lr"]
        assert (found - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-2 * total), name
