"""Converts groups to and from a checkpoint, with their samples so far: tokens, weight versions and outcomes.

Legend: S is the number of responses of all groups; each kind of array of these responses is concatenated to one array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from dovetail.interfaces import (
    Completion,
    Failure,
    FailureKind,
    FinishReason,
    Outcome,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Trajectory,
)
from dovetail.telemetry import plain
from dovetail_rollouts.group import Group
from dovetail_rollouts.sampling import asked_of

_TOKENS = {
    "response_ids": np.int64,
    "weight_versions": np.int64,
    "log_probs": np.float32,
    "raw_log_probs": np.float32,
    "response_mask": np.bool_,
    "prompt_ids": np.int64,
}
"""Dtypes of a completion's arrays, by field."""


def pack(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the state of groups, for a checkpoint. Of the results of reward functions, only numbers and texts are kept."""
    if not groups:
        return {"groups": []}
    responses = [response for group in groups for response in _responses(group)]
    arrays: dict[str, list[np.ndarray | None]] = {
        name: [getattr(completion, name) for _, _, completion, _ in responses] for name in _TOKENS
    }
    arrays["token_rewards"] = [
        getattr(sample.outcome, "token_rewards", None) if sample else None
        for _, _, _, sample in responses
    ]
    return {
        "groups": [
            {
                "key": list(group.prompt.key),
                "n": group.n,
                "baseline": group.baseline,
                "asked": sorted(asked_of(group.sampling)),
                "finished": group.finished,
                "due": group.due,
                "priority": group.priority,
                "responses": len(_responses(group)),
            }
            for group in groups
        ],
        "responses": [_document(*response) for response in responses],
        "arrays": {name: _packed(rows) for name, rows in arrays.items()},
    }


def unpack(
    state: Mapping[str, Any],
    issued: Callable[[int, int, int], Prompt],
    sampling: Callable[[Collection[str]], SamplingParams],
) -> list[Group]:
    """Restore groups from the state that `pack` returned.

    Args:
        state: the result of `pack`.
        issued: a function that returns the prompt with a given epoch, index and attempt (`Prompt.key`).
        sampling: a function that returns the sampling parameters of a group's missing samples, given the log-probability columns that
            the group requests.
    """
    if not state["groups"]:
        return []
    arrays = {name: _rows(packed) for name, packed in state["arrays"].items()}
    columns = (dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True))
    rows = zip(state["responses"], columns, strict=True)
    groups = []
    for entry in state["groups"]:
        epoch, prompt, attempt = entry["key"]
        group = Group(
            prompt=issued(epoch, prompt, attempt),
            n=entry["n"],
            sampling=sampling(entry["asked"]),
            baseline=entry["baseline"],
            finished=entry["finished"],
            due=entry["due"],
            priority=entry["priority"],
        )
        earlier: list[Completion] = []
        for document, found in islice(rows, entry["responses"]):
            name, completion = document["sample_id"], _completion(document, found)
            if document["is"] == "earlier":
                earlier.append(completion)
                continue
            if document["is"] == "cut":
                group.cut[name] = completion
                continue
            sample = Sample(
                sample_id=name,
                prompt=issued(epoch, prompt, document["attempt"]),
                text=document["text"],
                completion=completion,
                earlier=tuple(earlier),
                outcome=_outcome(document, found),
                trajectory=Trajectory.from_json(document["trajectory"])
                if "trajectory" in document
                else None,
            )
            earlier = []
            if document["is"] == "arrived":
                group.arrived[name] = sample
            elif document["is"] == "greedy":
                group.greedy = sample
            else:
                group.samples.append(sample)
        groups.append(group)
    return groups


_Response = tuple[str, str, Completion, Sample | None]
"""One sequence of a group, as it is packed: its role, its key (the sample id, or the key in `Group.cut`), its tokens, and its sample.

The role is the field of the group that holds the response: `sample` (of `Group.samples`), `greedy`, `arrived` or `cut`. A sample of
several sequences has its other sequences before its last one, with the role `earlier`. The sample is None for `earlier` and `cut`.
"""


def _responses(group: Group) -> list[_Response]:
    whole = [
        *(("sample", sample) for sample in group.samples),
        *(("greedy", sample) for sample in filter(None, [group.greedy])),
        *(("arrived", sample) for sample in group.arrived.values()),
    ]
    return [
        *(
            row
            for what, s in whole
            if s.completion is not None
            for row in (
                *(("earlier", s.sample_id, sequence, None) for sequence in s.earlier),
                (what, s.sample_id, s.completion, s),
            )
        ),
        *(("cut", name, completion, None) for name, completion in group.cut.items()),
    ]


def _document(
    what: str, sample_id: str, completion: Completion, sample: Sample | None
) -> dict[str, Any]:
    document = {
        "is": what,
        "sample_id": sample_id,
        "request_id": completion.request_id,
        "number": completion.sample,
        "finish_reason": str(completion.finish_reason),
    }
    if sample is None:
        return document
    document |= {"attempt": sample.prompt.attempt, "text": sample.text}
    if sample.trajectory is not None:
        document["trajectory"] = sample.trajectory.as_json()
    match sample.outcome:
        case Failure(kind=kind, message=message, retryable=retryable):
            document["failure"] = [str(kind), message, retryable]
        case Score(value=value, components=components, extras=extras):
            document["score"] = float(value)
            document["components"] = {name: float(part) for name, part in components.items()}
            document["extras"] = {
                str(name): plain(value)
                for name, value in extras.items()
                if value is None or isinstance(value, bool | int | float | str)
            }
    return document


def _completion(document: Mapping[str, Any], found: Mapping[str, np.ndarray | None]) -> Completion:
    tokens: Mapping[str, Any] = {name: found[name] for name in _TOKENS}
    return Completion(
        request_id=document["request_id"],
        sample=document["number"],
        finish_reason=FinishReason(document["finish_reason"]),
        **tokens,
    )


def _outcome(document: Mapping[str, Any], found: Mapping[str, np.ndarray | None]) -> Outcome | None:
    if "failure" in document:
        kind, message, retryable = document["failure"]
        return Failure(kind=FailureKind(kind), message=message, retryable=retryable)
    if "score" not in document:
        return None
    return Score(
        value=document["score"],
        token_rewards=found["token_rewards"],
        components=document["components"],
        extras=document["extras"],
    )


def _packed(rows: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    """Concatenate S rows to `values`, with the length of each row in `lengths`, int64 [S]; the length is −1 for a row that is None."""
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
