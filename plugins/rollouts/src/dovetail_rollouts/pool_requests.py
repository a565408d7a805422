"""Requests of a rollout pool: the part that is asked of one replica, and what a replica may answer."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from dovetail.errors import RolloutError
from dovetail.interfaces import Completion, RolloutRequest


def part_of(request: RolloutRequest, samples: list[int], *, attempt: int) -> RolloutRequest:
    """Return the request for some of its samples; a retry has an id of its own."""
    if attempt == 0:
        return request
    return attrs.evolve(
        request,
        request_id=_retry_name(request.request_id, attempt),
        streams=tuple(request.streams[sample] for sample in samples),
    )


def names_of(request_id: str, attempts: int) -> list[str]:
    """Return every id under which a request may run, in so many attempts."""
    return [request_id, *(_retry_name(request_id, attempt) for attempt in range(1, attempts))]


def original(samples: list[int], completion: Completion, missing: Mapping[int, object]) -> int:
    """Return which sample of the original request a completion is.

    Raises:
        RolloutError: it is none that was asked for, or came before.
    """
    if not 0 <= completion.sample < len(samples):
        raise RolloutError(f"it returned sample {completion.sample} of {len(samples)}")
    sample = samples[completion.sample]
    if sample not in missing:
        raise RolloutError(f"it returned sample {completion.sample} twice")
    return sample


def nobody_left(request: RolloutRequest, errors: list[str]) -> RolloutError:
    """Return the error of a request that no replica can take."""
    if not errors:
        return RolloutError(
            f"request {request.request_id!r} can't be generated: no rollout replica is left",
            hint="join a replica, or raise rollout.replicas",
        )
    return RolloutError(
        f"request {request.request_id!r} failed on every rollout replica: " + "; ".join(errors)
    )


def _retry_name(request_id: str, attempt: int) -> str:
    return f"{request_id}#retry{attempt}"
