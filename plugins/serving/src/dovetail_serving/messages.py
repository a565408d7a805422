"""The messages between a rollout and its server, as frames: calls, results and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from dovetail.errors import RequestRefusedError, RolloutError, WeightSyncError
from dovetail.interfaces import FinishReason, MediaRef, SamplingParams
from dovetail_serving.backend import SampleCall, SampleResult
from dovetail_serving.frames import Frame, pack

PREFIX = "/dovetail/v1/"
"""The prefix of a server's paths for Dovetail."""
PROTOCOL = 2
"""The protocol's version, which must be equal in client and server."""
DRAINING = "dovetail-draining"
"""HTTP header by which a server announces its coming shutdown in the answers to health checks."""
ENGINE_DIED = "EngineDeadError"
"""The error kind that a server reports if its engine has died."""
_DTYPES = {"log_probs": np.float32, "raw_log_probs": np.float32, "weight_versions": np.int64}
"""Optional arrays of a sample besides its tokens, with their dtypes."""


def packed_calls(calls: Mapping[str, SampleCall]) -> bytes:
    """Return one frame (binary message) with these calls. A prompt or sampling parameters that calls share are sent only once.

    Args:
        calls: the calls by the names that they get on the server.
    """
    prompts: dict[int, int] = {}
    samplings: dict[SamplingParams, int] = {}
    arrays: list[np.ndarray] = []
    rows = []
    for name, call in calls.items():
        prompt = prompts.setdefault(id(call.prompt_ids), len(arrays))
        if prompt == len(arrays):
            arrays.append(np.asarray(call.prompt_ids, np.int32))
        sampling = samplings.setdefault(call.sampling, len(samplings))
        rows.append([name, prompt, sampling, call.seed, call.priority])
    header: dict[str, Any] = {
        "calls": rows,
        "samplings": [attrs.asdict(sampling) for sampling in samplings],
    }
    media = {name: [one.as_json() for one in call.media] for name, call in calls.items()}
    if any(media.values()):
        header["media"] = media
    return pack(header, arrays)


def calls_of(frame: Frame) -> list[SampleCall]:
    """Return the calls in a frame from `packed_calls`; their ids are the names on the server.

    Raises:
        RolloutError: the frame has no calls, or malformed ones.
    """
    try:
        samplings = [
            SamplingParams(
                **{
                    **fields,
                    "stop": tuple(fields["stop"]),
                    "stop_token_ids": tuple(fields["stop_token_ids"]),
                }
            )
            for fields in frame.header["samplings"]
        ]
        prompts = [array.tolist() for array in frame.arrays]
        media = frame.header.get("media", {})
        return [
            SampleCall(
                call_id=call_id,
                prompt_ids=prompts[prompt],
                sampling=samplings[sampling],
                seed=seed,
                media=tuple(map(MediaRef.from_json, media.get(call_id, ()))),
                priority=priority,
            )
            for call_id, prompt, sampling, seed, priority in frame.header["calls"]
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RolloutError(f"the calls in a frame can't be read: {error!r}") from error


def packed_result(call_id: str, result: SampleResult) -> bytes:
    """Return a finished sample as a frame: int32 token ids, and float32 log-probabilities and int64 versions if present."""
    found = {"response_ids": np.asarray(result.response_ids, np.int32)}
    for name, dtype in _DTYPES.items():
        if (array := getattr(result, name)) is not None:
            found[name] = np.asarray(array, dtype)
    header = {"call": call_id, "finish": result.finish_reason.value, "fields": [*found]}
    return pack(header, [*found.values()])


def packed_error(call_id: str, error: BaseException) -> bytes:
    """Return the error of a failed sample as a frame."""
    return pack({"call": call_id, "error": str(error) or repr(error), "kind": type(error).__name__})


def result_of(frame: Frame) -> SampleResult | RolloutError:
    """Return a call's result from a frame: the sample, or the error that ended the call.

    Raises:
        RolloutError: the frame holds neither a sample nor an error.
    """
    try:
        if "error" in frame.header:
            return error_of(frame.header)
        found = dict(zip(frame.header["fields"], frame.arrays, strict=True))
        return SampleResult(
            response_ids=found["response_ids"].astype(np.int64),
            finish_reason=FinishReason(frame.header["finish"]),
            **{name: found.get(name) for name in _DTYPES},
        )
    except (KeyError, ValueError) as error:
        raise RolloutError(f"the sample in a frame can't be read: {error!r}") from error


def error_of(header: Any) -> RolloutError:
    """Return the error in a server's answer as an exception.

    Raises:
        ValueError: the answer holds no error.
    """
    kind, text = header.get("kind"), header.get("error")
    if not isinstance(kind, str) or not isinstance(text, str):
        raise ValueError(f"expected an error with the texts `error` and `kind`, got {header!r}")  # noqa: TRY004 - data, not an argument
    if kind == RequestRefusedError.__name__:
        return RequestRefusedError(text)
    if kind in (RolloutError.__name__, WeightSyncError.__name__, ENGINE_DIED):
        return RolloutError(text)
    return RolloutError(f"{kind}: {text}")


def nothing_yet(call: SampleCall) -> SampleResult:
    """Return the empty result of a call that was aborted before the server received it."""
    asked = call.sampling.log_probs or call.sampling.raw_log_probs
    return SampleResult(
        response_ids=np.zeros(0, np.int64),
        finish_reason=FinishReason.ABORT,
        log_probs=np.zeros(0, np.float32) if asked else None,
    )
