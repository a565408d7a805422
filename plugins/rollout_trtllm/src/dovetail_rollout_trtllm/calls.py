"""Calls: Dovetail's sampling parameters as TensorRT-LLM's, and what it returns as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import RolloutError
from dovetail.interfaces import FinishReason, SamplingParams
from dovetail.serving import SampleResult
from dovetail_rollout_trtllm.engine_types import ChosenToken, Output, Request

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "cancelled": FinishReason.ABORT,
}


def sampling_arguments(sampling: SamplingParams, processed: Any) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's `SamplingParams` for one sample.

    Args:
        sampling: what is asked for; its stop tokens are all there are: end-of-sequence tokens among them.
        processed: TensorRT-LLM's name for log-probabilities as drawn.
    """
    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": max(sampling.top_k, 0),
        # The model's own end is among the stop tokens where it counts; -1 is no token.
        "end_id": -1,
        "pad_id": -1,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        # Of tokens as of strings: what ends a response is part of it.
        "include_stop_str_in_output": True,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }
    if sampling.temperature == 0:
        # Greedy, whatever else is said; top_p and top_k would make it a draw again.
        arguments |= {"top_p": None, "top_k": 1}
    if sampling.stop:
        arguments["stop"] = list(sampling.stop)
    if sampling.log_probs or sampling.raw_log_probs:
        arguments |= {"logprobs": 0, "logprobs_mode": processed}
    return arguments


def scoring_arguments() -> dict[str, Any]:
    """Arguments of TensorRT-LLM's `SamplingParams` that ask for the logits of a prompt, and for one token more at least."""
    return {
        "max_tokens": 1,
        "top_k": 1,
        "end_id": -1,
        "pad_id": -1,
        "detokenize": False,
        "add_special_tokens": False,
        "return_context_logits": True,
    }


def result_of(request: Request, *, log_probs: bool) -> SampleResult:
    """A finished or aborted sample.

    Args:
        request: ended, with one output.
        log_probs: whether they were asked for.

    Raises:
        RolloutError: TensorRT-LLM says that it failed, gave an unknown reason, or not one log-probability for each token.
    """
    output = _output(request)
    ids_T = np.array(output.token_ids, dtype=np.int64)
    reason = _REASONS.get(output.finish_reason or "")
    if reason is None:
        raise RolloutError(
            f"TensorRT-LLM ended a sample for the reason {output.finish_reason!r}; {', '.join(_REASONS)} are known"
        )
    log_probs_T = None
    if log_probs:
        log_probs_T = chosen_log_probs(output.logprobs or (), ids_T)
    return SampleResult(response_ids=ids_T, finish_reason=reason, log_probs=log_probs_T)


def chosen_log_probs(
    given: Sequence[Mapping[int, ChosenToken] | float], ids_T: np.ndarray
) -> np.ndarray:
    """float32 [T]: the log-probability of each token.

    Args:
        given: T numbers, or T entries by token id, the chosen token's among them.
        ids_T: int64 [T].

    Raises:
        RolloutError: there is another number of entries, or one without its token.
    """
    if len(given) != len(ids_T):
        raise RolloutError(
            f"TensorRT-LLM returned {len(given)} log-probabilities for {len(ids_T)} tokens"
        )
    found = np.empty(len(ids_T), dtype=np.float32)
    for position, (entry, token) in enumerate(zip(given, ids_T.tolist(), strict=True)):
        if isinstance(entry, Mapping):
            if token not in entry:
                raise RolloutError(
                    f"TensorRT-LLM returned no log-probability for token {token} at position {position}, but for "
                    f"{sorted(entry)}"
                )
            found[position] = entry[token].logprob
        else:
            found[position] = entry
    return found


def scores_of(request: Request, ids: Sequence[int]) -> np.ndarray:
    """float32 [L − 1]: log-probabilities (full softmax, temperature 1) of every token of a prompt but the first.

    Raises:
        RolloutError: TensorRT-LLM says that it failed, or did not return logits for all L tokens.
    """
    _output(request)
    logits_LV = request.context_logits
    if logits_LV is None or logits_LV.shape[0] != len(ids):
        rows = "none" if logits_LV is None else f"{logits_LV.shape[0]} rows"
        raise RolloutError(
            f"TensorRT-LLM was asked for the logits of {len(ids)} tokens and returned {rows}"
        )
    return _log_probs_of_next(logits_LV, torch.tensor(ids))


def _log_probs_of_next(logits_LV: Tensor, ids_L: Tensor) -> np.ndarray:
    log_probs_LV = logits_LV[:-1].float().cpu().log_softmax(dim=-1)
    return log_probs_LV.gather(1, ids_L[1:, None])[:, 0].numpy()


def _output(request: Request) -> Output:
    if request.error:
        raise RolloutError(f"TensorRT-LLM failed: {request.error}")
    return request.outputs[0]
