"""Calls: Dovetail's sampling parameters as vLLM's, and what vLLM returns as arrays."""

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
        """Make vLLM's SamplingParams for one sample.

        Args:
            sampling: the sampling parameters; their stop tokens include the end-of-sequence tokens.
            seed: the sample's own, or None.
        """
        if seed is not None:
            return _made(sampling, seed)
        if sampling not in self._made:
            if len(self._made) > 64:
                self._made.clear()
            self._made[sampling] = _made(sampling, None)
        return self._made[sampling]

    def scoring(self) -> Any:
        """Make vLLM's SamplingParams that ask how likely the tokens of the prompt are."""
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
        # Ends of sequence are among the stop tokens where they count.
        ignore_eos=True,
        logprobs=0 if sampling.log_probs or sampling.raw_log_probs else None,
        flat_logprobs=True,
        # Text costs vLLM more than the log-probabilities do; only stop strings need it.
        detokenize=strings,
        include_stop_str_in_output=strings,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def result_of(output: Any, recorded_T: np.ndarray | None = None) -> SampleResult:
    """Return a finished or aborted sample.

    Args:
        output: vLLM's RequestOutput with one completion.
        recorded_T: its log-probabilities, float32 [T], where vLLM did not return them.

    Raises:
        RolloutError: vLLM gave an unknown reason, or not one log-probability for each token.
    """
    completion = output.outputs[0]
    ids_T = np.array(completion.token_ids, dtype=np.int64)
    reason = _REASONS.get(completion.finish_reason)
    if reason is None:
        raise RolloutError(f"vLLM ended a sample for the reason {completion.finish_reason!r}")
    log_probs_T = recorded_T
    if recorded_T is None and completion.logprobs is not None:
        log_probs_T = chosen_log_probs(completion.logprobs)
    if log_probs_T is not None and len(log_probs_T) != len(ids_T):
        raise RolloutError(
            f"vLLM returned {len(log_probs_T)} log-probabilities for {len(ids_T)} tokens"
        )
    return SampleResult(
        response_ids=ids_T,
        finish_reason=reason,
        log_probs=log_probs_T,
        weight_versions=_versions_of(completion, len(ids_T)),
    )


def _versions_of(completion: Any, tokens: int) -> np.ndarray | None:
    """int64 [T]: the version that made each token, as `EngineDriver.load` labels them; 0 is what vLLM started with.

    None where vLLM does not say, which it does since 0.32.
    """
    spans = getattr(completion, "weight_versions", None)
    if spans is None:
        return None
    versions_T = np.zeros(tokens, np.int64)
    for span in spans:
        versions_T[span.start : span.end] = int(span.version) if span.version.isdigit() else 0
    return versions_T


def scores_of(output: Any, tokens: int) -> np.ndarray:
    """Return float32 [L − 1]: log-probabilities of every token of a scored sequence but the first.

    Raises:
        RolloutError: vLLM returned another number of them.
    """
    scores = chosen_log_probs(output.prompt_logprobs)
    if len(scores) != tokens - 1:
        raise RolloutError(f"vLLM scored {len(scores)} tokens of a sequence of {tokens}")
    return scores


def chosen_log_probs(flat: Any) -> np.ndarray:
    """Return float32 [T]: the log-probability of the token at each position, which vLLM puts first among its entries.

    Args:
        flat: vLLM's FlatLogprobs; positions without entries (the first of a prompt) are left out.
    """
    values = np.array(flat.logprobs, dtype=np.float32)
    starts = np.array(flat.start_indices, dtype=np.int64)
    ends = np.array(flat.end_indices, dtype=np.int64)
    return values[starts[ends > starts]]
