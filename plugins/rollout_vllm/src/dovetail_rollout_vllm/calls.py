"""Conversion of Dovetail's sampling parameters to vLLM's, and of vLLM's outputs to arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import FinishReason, SamplingParams
from dovetail_serving import SampleResult

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class SamplingTable:
    """Creates vLLM's sampling parameters, and caches those without a seed for all samples with the same settings."""

    def __init__(self) -> None:
        self._made: dict[SamplingParams, Any] = {}

    def of(self, sampling: SamplingParams, seed: int | None) -> Any:
        """Return vLLM's SamplingParams for one sample.

        Args:
            sampling: the sampling parameters; their stop tokens include the end-of-sequence tokens.
            seed: the sample's seed; None to sample without a seed.
        """
        if seed is not None:
            return _made(sampling, seed)
        if sampling not in self._made:
            if len(self._made) > 64:
                self._made.clear()
            self._made[sampling] = _made(sampling, None)
        return self._made[sampling]

    def scoring(self) -> Any:
        """Return vLLM's SamplingParams for requesting log-probabilities of a prompt's tokens."""
        from vllm import SamplingParams as TheirParams
        from vllm.sampling_params import RequestOutputKind

        return TheirParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _made(sampling: SamplingParams, seed: int | None) -> Any:
    from vllm import SamplingParams as TheirParams
    from vllm.sampling_params import RequestOutputKind

    strings = bool(sampling.stop)
    return TheirParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        stop=list(sampling.stop) if strings else None,
        stop_token_ids=list(sampling.stop_token_ids),
        # If end-of-sequence tokens end a response, they are among the stop tokens.
        ignore_eos=True,
        logprobs=0 if sampling.log_probs or sampling.raw_log_probs else None,
        flat_logprobs=True,
        # Only stop strings need text, which costs vLLM more time than log-probabilities.
        detokenize=strings,
        include_stop_str_in_output=strings,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def result_of(output: Any, recorded_T: np.ndarray | None = None) -> SampleResult:
    """Convert vLLM's output to a finished or aborted sample.

    Args:
        output: vLLM's RequestOutput with one completion.
        recorded_T: the sample's log-probabilities, float32 [T], if vLLM's output lacks them.

    Raises:
        RolloutError: the finish reason is unknown, or a token has no log-probability.
    """
    completion = output.outputs[0]
    ids_T = np.array(completion.token_ids, dtype=np.int64)
    reason = _REASONS.get(completion.finish_reason)
    if reason is None:
        raise RolloutError(
            f"vLLM ended a sample with the unknown finish reason {completion.finish_reason!r}; expected {' or '.join(_REASONS)}"
        )
    log_probs_T = recorded_T
    if recorded_T is None and completion.logprobs is not None:
        log_probs_T = chosen_log_probs(completion.logprobs)
    if log_probs_T is not None and len(log_probs_T) != len(ids_T):
        raise RolloutError(
            f"vLLM returned {len(log_probs_T)} log-probabilities for {len(ids_T)} tokens; expected one for each token"
        )
    return SampleResult(
        response_ids=ids_T,
        finish_reason=reason,
        log_probs=log_probs_T,
        weight_versions=_versions_of(completion, len(ids_T)),
    )


def _versions_of(completion: Any, tokens: int) -> np.ndarray | None:
    """Return the version of the weights that produced each token, int64 [T], with 0 for the initial weights.

    Return None if vLLM reports no versions, as before 0.32. `EngineDriver.load` gives vLLM the version of each update.
    """
    spans = getattr(completion, "weight_versions", None)
    if spans is None:
        return None
    versions_T = np.zeros(tokens, np.int64)
    for span in spans:
        versions_T[span.start : span.end] = int(span.version) if span.version.isdigit() else 0
    return versions_T


def scores_of(output: Any, tokens: int) -> np.ndarray:
    """Return the log-probabilities of every token but the first of a scored sequence of L = `tokens` tokens, float32 [L − 1].

    Raises:
        RolloutError: vLLM returned another number of log-probabilities.
    """
    scores = chosen_log_probs(output.prompt_logprobs)
    if len(scores) != tokens - 1:
        raise RolloutError(
            f"vLLM returned {len(scores)} log-probabilities for a scored sequence of {tokens} tokens; expected {tokens - 1}"
        )
    return scores


def chosen_log_probs(flat: Any) -> np.ndarray:
    """Return the log-probability of the token at each position, float32 [T]; it is the first of vLLM's entries for the position.

    Args:
        flat: vLLM's FlatLogprobs; positions without entries, such as a prompt's first, are skipped.
    """
    values = np.array(flat.logprobs, dtype=np.float32)
    starts = np.array(flat.start_indices, dtype=np.int64)
    ends = np.array(flat.end_indices, dtype=np.int64)
    return values[starts[ends > starts]]
