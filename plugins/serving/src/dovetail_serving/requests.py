"""Checks requests, converts samples to calls of the engine, and results of the engine to completions."""

from __future__ import annotations

import hashlib
from typing import Literal

import attrs
import numpy as np

from dovetail.interfaces import Completion, FinishReason, MediaRef, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail_datasets import ModelFacts
from dovetail_serving.backend import SampleCall, SampleResult


def problem_of(
    request: RolloutRequest,
    facts: ModelFacts,
    *,
    engine: str,
    log_probs: Literal["processed", "raw"],
) -> str | None:
    """Return the reason why an engine can't generate samples for a request; None if it can.

    Args:
        request: the request.
        facts: the model's vocabulary size and maximum length.
        engine: the engine's name in messages.
        log_probs: the distribution of the engine's log-probabilities, as in `ServingRollout.log_probs`.
    """
    sampling, ids_P = request.sampling, request.prompt_ids
    if len(ids_P) == 0:
        return "its prompt is empty"
    if ids_P.min() < 0 or ids_P.max() >= facts.vocab_size:
        return f"its prompt holds token ids outside the vocabulary; expected 0 to {facts.vocab_size - 1}"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens is {sampling.max_new_tokens}; expected 1 or more"
    if sampling.temperature < 0:
        return f"temperature is {sampling.temperature}; expected 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; expected a number above 0 and at most 1"
    if sampling.top_k < -1:
        return f"top_k is {sampling.top_k}; expected -1 or 0 (all tokens), or a number above 0"
    if "" in sampling.stop:
        return "a stop string is empty; expected at least one character"
    if problem := _log_probs_problem(sampling, engine, log_probs):
        return problem
    total = len(ids_P) + sampling.max_new_tokens
    if facts.max_positions is not None and total > facts.max_positions:
        return (
            f"{len(ids_P)} prompt tokens and {sampling.max_new_tokens} new tokens exceed the limit of {facts.max_positions} tokens "
            "(rollout.max_model_len, or the model's positions)"
        )
    return None


def _log_probs_problem(
    sampling: SamplingParams, engine: str, given: Literal["processed", "raw"]
) -> str | None:
    if sampling.top_p == 1 and sampling.top_k <= 0:
        return None  # without top-p and top-k, both log-probabilities are equal
    if given == "processed" and sampling.raw_log_probs:
        return f"{engine} can't return log-probabilities before top_p and top_k (raw_log_probs), only after them (log_probs)"
    if given == "raw" and sampling.log_probs and sampling.top_k <= 0:
        return f"{engine} can't return log-probabilities after top_p (log_probs) unless top_k is set; without it, use raw_log_probs"
    return None


def with_ends(sampling: SamplingParams, facts: ModelFacts) -> SamplingParams:
    """Return the parameters with the model's end-of-sequence tokens added to the stop tokens, unless `ignore_eos` is set."""
    if sampling.ignore_eos:
        return sampling
    stops = dict.fromkeys((*sampling.stop_token_ids, *facts.eos_token_ids))
    return attrs.evolve(sampling, stop_token_ids=tuple(stops))


def sample_seed(stream: SampleStream) -> int:
    """Return a 63-bit seed, derived from a sample's random stream and the position of the first token to generate."""
    name = f"{stream.key()}/{stream.offset}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def call_for(
    call_id: str,
    prompt_ids: list[int],
    sampling: SamplingParams,
    stream: SampleStream,
    earlier: Completion | None,
    *,
    seeded: bool,
    media: tuple[MediaRef, ...] = (),
    priority: int = 0,
) -> SampleCall:
    """Return the engine's request for a sample, or for the rest of a partial sample.

    Args:
        call_id: the sample's call id.
        prompt_ids: P token ids, the same list for all samples of a request.
        sampling: the sampling parameters of the whole sample, with end-of-sequence tokens.
        stream: the sample's random stream.
        earlier: the partial sample with T₀ tokens, whose keys and values are computed again; None for a new sample.
        seeded: whether the sample gets its own seed.
        media: the prompt's images.
        priority: the request's priority.
    """
    if earlier is not None:
        done = len(earlier.response_ids)
        prompt_ids = prompt_ids + earlier.response_ids.tolist()
        sampling = attrs.evolve(sampling, max_new_tokens=sampling.max_new_tokens - done)
        stream = attrs.evolve(stream, offset=stream.offset + done)
    seed = sample_seed(stream) if seeded else None
    return SampleCall(
        call_id=call_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        seed=seed,
        media=media,
        priority=priority,
    )


def completion_of(
    request: RolloutRequest,
    index: int,
    result: SampleResult,
    version: int,
    earlier: Completion | None,
) -> Completion:
    """Return a sample, complete or partial: the earlier partial sample, if any, followed by the engine's result.

    Args:
        request: the sample's request.
        index: the sample's index among the request's samples.
        result: the engine's result for the tokens after `earlier`.
        version: the version of the result's tokens, unless the result has a version for each token.
        earlier: the partial sample before an interruption; None for a new sample.
    """
    sampling = request.sampling
    part = Completion(
        request_id=request.request_id,
        sample=index,
        response_ids=result.response_ids,
        finish_reason=result.finish_reason,
        weight_versions=(
            np.full(len(result.response_ids), version, dtype=np.int64)
            if result.weight_versions is None
            else result.weight_versions
        ),
        log_probs=result.log_probs if sampling.log_probs else None,
        # Without top-p and top-k, raw and processed log-probabilities are equal.
        raw_log_probs=_raw_of(result) if sampling.raw_log_probs else None,
    )
    return part if earlier is None else part.after(earlier)


def _raw_of(result: SampleResult) -> np.ndarray | None:
    return result.log_probs if result.raw_log_probs is None else result.raw_log_probs


def cut_short(request: RolloutRequest, index: int, earlier: Completion | None) -> Completion:
    """Return the partial, perhaps empty, sample of a request that was aborted while it waited."""
    if earlier is not None:
        return earlier
    wanted = request.sampling.log_probs or request.sampling.raw_log_probs
    nothing = SampleResult(
        response_ids=np.empty(0, dtype=np.int64),
        finish_reason=FinishReason.ABORT,
        log_probs=np.empty(0, dtype=np.float32) if wanted else None,
    )
    return completion_of(request, index, nothing, 0, None)
