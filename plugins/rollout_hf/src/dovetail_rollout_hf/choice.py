"""The choice between the two decoders, and a test of the chosen decoder against the model's own forward pass.

Legend: N rows, P prompts, L prompt columns, T tokens of one sequence, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from dovetail.errors import ModelError
from dovetail.interfaces import Logger
from dovetail_rollout_hf.cache import Arrival, KvCache, empty_index
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.fused_decoder import FusedDecoder, why_not_fused

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference of logits with which a decoder passes the test, relative to 1 plus the largest logit."""


def choose_decoder(
    model: object, wanted: Literal["auto", "fused", "transformers"], logger: Logger
) -> Decoder:
    """Construct the configured decoder, and test its logits against the model's own forward pass.

    Raises:
        ModelError: the configured decoder does not support the model, or its logits differ from the model's.
    """
    from dovetail_rollout_hf.transformers_decoder import TransformersDecoder

    reason = why_not_fused(model) if wanted != "transformers" else "not asked for"
    if wanted == "fused" and reason:
        raise ModelError(
            f"rollout.decoder=fused does not support {type(model).__name__}: {reason}",
            hint="use rollout.decoder=auto or transformers",
        )
    if not reason:
        fused = FusedDecoder(model)
        complaint = _complaint(fused, model)
        if complaint is None:
            return fused
        message = f"the fused decoder does not reproduce {type(model).__name__}: {complaint}"
        if wanted == "fused":
            raise ModelError(message, hint="use rollout.decoder=transformers")
        logger.warning("%s; using the transformers decoder", message)
    elif wanted == "auto":
        logger.info("using the transformers decoder: %s", reason)
    general = TransformersDecoder(model)
    complaint = _complaint(general, model)
    if complaint is not None:
        raise ModelError(
            f"{type(model).__name__} can't be decoded with a KV cache: {complaint}",
            hint="the architecture may keep another state than keys and values; use another rollout engine, such as rollout.name=vllm",
        )
    return general


def _complaint(decoder: Decoder, model: object) -> str | None:
    """Return the reason why a decoder fails the test of `prove`: an exception or a difference of logits; None if it passes."""
    try:
        excess = prove(decoder, model)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    if excess <= 1:
        return None
    return f"its logits differ from the model's by {excess:.3g} times the tolerance"


@torch.inference_mode()
def prove(decoder: Decoder, model: Any) -> float:
    """Compare a decoder's logits with the model's own forward passes, on two prompts of different length.

    Returns:
        The largest difference of logits as a multiple of the tolerance; infinity if a logit is NaN.
    """
    device, size = model.device, int(model.config.get_text_config().vocab_size)
    lengths, steps = (9, 5), 3
    sequences = [
        torch.arange(3, 3 + 11 * (length + steps), 11, device=device) % size for length in lengths
    ]
    longest = max(lengths)
    pad_P = torch.tensor([longest - length for length in lengths], device=device)
    ids_PL = torch.zeros((2, longest), dtype=torch.int64, device=device)
    for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        ids_PL[row, longest - length :] = sequence[:length]
    prefill = decoder.prefill(ids_PL, pad_P)
    source_N = torch.tensor([0, 0, 1], device=device)
    cache = KvCache()
    cache.rebuild(
        kept_N=empty_index(device),
        span=(0, 0),
        end=longest,
        capacity=longest + steps,
        arrivals=[Arrival(prefill, source_N)],
    )
    decoder.begin(cache, pad_P[source_N])
    steps_logits = [prefill.logits_PV[source_N]]
    for step in range(steps):
        tokens_P = torch.stack([s[n + step] for s, n in zip(sequences, lengths, strict=True)])
        steps_logits.append(decoder.step(tokens_P[source_N], longest + step))
    worst = 0.0
    for row, prompt in enumerate(source_N.tolist()):
        plain_TV = model(sequences[prompt][None], use_cache=False).logits[0].float()
        plain_TV = plain_TV[lengths[prompt] - 1 :]
        ours_TV = torch.stack([logits_NV[row] for logits_NV in steps_logits])
        scale = 1 + plain_TV.abs().max()
        difference = ((ours_TV - plain_TV).abs().max() / scale).item()
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst / _TOLERANCE[model.dtype]
