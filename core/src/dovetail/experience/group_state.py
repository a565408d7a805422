"""Finished groups in a checkpoint: their tokens, weight versions and outcomes, packed end to end over S samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.experience.generation import Group
from dovetail.interfaces.reward import Failure, FailureKind, Outcome, Sample, Score
from dovetail.interfaces.rollout import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from dovetail.interfaces.data import Prompt

_TOKENS = {
    "response_ids": np.int64,
    "weight_versions": np.int64,
    "log_probs": np.float32,
    "raw_log_probs": np.float32,
}
"""Arrays of a completion."""


def pack(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the state of finished groups, for a checkpoint. What a reward function returned besides numbers and texts is left out."""
    if not groups:
        return {"groups": []}
    kept = [[*group.samples, *([group.greedy] if group.greedy else [])] for group in groups]
    samples = [sample for row in kept for sample in row]
    arrays: dict[str, list[np.ndarray | None]] = {
        name: [getattr(sample.completion, name) for sample in samples] for name in _TOKENS
    }
    arrays["token_rewards"] = [getattr(s.outcome, "token_rewards", None) for s in samples]
    return {
        "groups": [
            {
                "key": list(group.prompt.key),
                "n": group.n,
                "samples": len(group.samples),
                "greedy": group.greedy is not None,
            }
            for group in groups
        ],
        "samples": [_sample(sample) for sample in samples],
        "arrays": {name: _packed(rows) for name, rows in arrays.items()},
    }


def unpack(
    state: Mapping[str, Any], issued: Callable[[int, int, int], Prompt], sampling: SamplingParams
) -> list[Group]:
    """Return the groups of a state that `pack` returned.

    Args:
        state: as it was packed.
        issued: returns the prompt of an epoch, its number and the number of an attempt.
        sampling: how samples are drawn that a group may still need.
    """
    if not state["groups"]:
        return []
    arrays = {name: _rows(packed) for name, packed in state["arrays"].items()}
    columns = (dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True))
    rows = zip(state["samples"], columns, strict=True)
    groups = []
    for entry in state["groups"]:
        epoch, prompt, attempt = entry["key"]
        samples = [
            _restored(document, found, issued(epoch, prompt, document["attempt"]))
            for document, found in islice(rows, entry["samples"] + entry["greedy"])
        ]
        groups.append(
            Group(
                prompt=issued(epoch, prompt, attempt),
                n=entry["n"],
                sampling=sampling,
                baseline=entry["greedy"],
                greedy=samples.pop() if entry["greedy"] else None,
                samples=samples,
                finished=True,
            )
        )
    return groups


def _sample(sample: Sample) -> dict[str, Any]:
    completion, outcome = sample.completion, sample.outcome
    assert completion is not None
    assert outcome is not None
    scored: dict[str, Any] = {"failure": None}
    if isinstance(outcome, Failure):
        scored["failure"] = [str(outcome.kind), outcome.message, outcome.retryable]
    else:
        scored["score"] = float(outcome.value)
        scored["components"] = {name: float(part) for name, part in outcome.components.items()}
        scored["extras"] = {
            str(name): value
            for name, value in outcome.extras.items()
            if value is None or isinstance(value, bool | int | float | str)
        }
    return {
        "sample_id": sample.sample_id,
        "attempt": sample.prompt.attempt,
        "text": sample.text,
        "request_id": completion.request_id,
        "number": completion.sample,
        "finish_reason": str(completion.finish_reason),
        **scored,
    }


def _restored(
    document: Mapping[str, Any], found: Mapping[str, np.ndarray | None], prompt: Prompt
) -> Sample:
    outcome: Outcome
    if document["failure"] is not None:
        kind, message, retryable = document["failure"]
        outcome = Failure(kind=FailureKind(kind), message=message, retryable=retryable)
    else:
        outcome = Score(
            value=document["score"],
            token_rewards=found["token_rewards"],
            components=document["components"],
            extras=document["extras"],
        )
    tokens: Mapping[str, Any] = {name: found[name] for name in _TOKENS}
    return Sample(
        sample_id=document["sample_id"],
        prompt=prompt,
        completion=Completion(
            request_id=document["request_id"],
            sample=document["number"],
            finish_reason=FinishReason(document["finish_reason"]),
            **tokens,
        ),
        text=document["text"],
        outcome=outcome,
    )


def _packed(rows: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    """S rows end to end; a length of −1 stands for None."""
    there = [row for row in rows if row is not None]
    return {
        "lengths": np.array([-1 if row is None else len(row) for row in rows], np.int64),
        "values": np.concatenate(there) if there else np.zeros(0, np.float32),
    }


def _rows(packed: Mapping[str, np.ndarray]) -> list[np.ndarray | None]:
    ends = np.cumsum(np.maximum(packed["lengths"], 0))
    return [
        None if length < 0 else packed["values"][end - length : end]
        for length, end in zip(packed["lengths"].tolist(), ends.tolist(), strict=True)
    ]
