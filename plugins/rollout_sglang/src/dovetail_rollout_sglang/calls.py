"""Conversion of Dovetail's sampling parameters to SGLang's, and of SGLang's outputs to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import FinishReason
from dovetail_serving import SampleCall, SampleResult

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def sampling_of(call: SampleCall) -> dict[str, Any]:
    """Return SGLang's sampling parameters for one sample, with end-of-sequence tokens among the stop tokens."""
    sampling = call.sampling
    found: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        # If end-of-sequence tokens end a response, they are among the stop tokens.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if call.seed is not None:
        found["sampling_seed"] = call.seed
    return found


def scoring() -> dict[str, Any]:
    """Return SGLang's sampling parameters for requesting log-probabilities of a prompt's tokens."""
    return {"max_new_tokens": 0, "temperature": 1.0, "ignore_eos": True}


def likeliest(call: SampleCall, vocab_size: int) -> int:
    """Return the number of most likely tokens whose log-probabilities are requested at each position.

    These are needed to compute the log-probabilities under the sampling distribution of top-k. The number is top-k, at most the size of the
    vocabulary; 0 without top-k, or if no log-probabilities are requested.
    """
    sampling = call.sampling
    return min(sampling.top_k, vocab_size) if sampling.log_probs and sampling.top_k > 0 else 0


def result_of(answer: Mapping[str, Any], *, log_probs: bool, top_p: float = 1.0) -> SampleResult:
    """Convert SGLang's answer to a finished or aborted sample.

    Args:
        answer: SGLang's answer to `/generate`.
        log_probs: whether log-probabilities were requested.
        top_p: the sampler's top-p, used if log-probabilities of the most likely tokens were requested.

    Raises:
        RolloutError: the finish reason is unknown, or a token has no log-probability.
    """
    about = answer["meta_info"]
    ids_T = np.array(answer.get("output_ids") or [], dtype=np.int64)
    found = about.get("finish_reason") or {}
    reason = _REASONS.get(str(found.get("type")))
    if reason is None:
        raise RolloutError(
            f"SGLang ended a sample with the unknown finish reason {found!r}; expected {' or '.join(_REASONS)}"
        )
    log_probs_T = None
    if log_probs:
        log_probs_T = values_of(about.get("output_token_logprobs") or [])
        if len(log_probs_T) != len(ids_T):
            raise RolloutError(
                f"SGLang returned {len(log_probs_T)} log-probabilities for {len(ids_T)} tokens; expected one for each token"
            )
    tops = about.get("output_top_logprobs")
    if log_probs_T is None or not tops:
        return SampleResult(response_ids=ids_T, finish_reason=reason, log_probs=log_probs_T)
    kept_T = np.array([kept_mass(values_of(entries), top_p) for entries in tops], np.float32)
    return SampleResult(
        response_ids=ids_T,
        finish_reason=reason,
        log_probs=log_probs_T - np.log(kept_T),
        raw_log_probs=log_probs_T,
    )


def kept_mass(log_probs_K: np.ndarray, top_p: float) -> float:
    """Return the total probability of the tokens from which SGLang samples with top-k and top-p.

    Of the k most likely tokens, SGLang keeps each token for which all more likely tokens together have at most the probability `top_p`.

    Args:
        log_probs_K: float32 [K], in nats: log-probabilities of the k most likely tokens under the full softmax.
        top_p: the sampler's top-p.
    """
    probs_K = np.sort(np.exp(log_probs_K.astype(np.float64)))[::-1]
    before_K = np.cumsum(probs_K) - probs_K
    return float(probs_K[before_K <= top_p].sum())


def scores_of(answer: Mapping[str, Any], tokens: int) -> np.ndarray:
    """Return the log-probabilities of every token but the first of a scored sequence of L = `tokens` tokens, float32 [L − 1].

    Raises:
        RolloutError: SGLang returned another number of log-probabilities.
    """
    scores = values_of(answer["meta_info"]["input_token_logprobs"][1:])
    if len(scores) != tokens - 1:
        raise RolloutError(
            f"SGLang returned {len(scores)} log-probabilities for a scored sequence of {tokens} tokens; expected {tokens - 1}"
        )
    return scores


def values_of(entries: Sequence[Sequence[Any]]) -> np.ndarray:
    """Return the log-probability of each token, float32 [T], from SGLang's entries `[log_prob, token_id, text]`."""
    return np.array([entry[0] for entry in entries], dtype=np.float32)
