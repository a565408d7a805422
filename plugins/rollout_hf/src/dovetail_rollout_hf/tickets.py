"""Communication between asyncio and the decode thread: requests go in, and samples and errors come out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs
import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import Completion, FinishReason, RolloutRequest
from dovetail_rollout_hf.stops import StopRule

T = TypeVar("T")


@attrs.define(eq=False)
class Ticket:
    """A submitted request, and the event loop and queue that receive its samples."""

    request: RolloutRequest
    stop: StopRule
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Completion | RolloutError]
    waiting: deque[int]
    """Indices of the samples that have not started."""
    left: int
    """Number of samples that have not been returned."""


def nothing(request: RolloutRequest, sample: int) -> Completion:
    """Return the empty completion of a sample that was aborted before its start."""
    none = np.empty(0, dtype=np.float32)
    return Completion(
        request_id=request.request_id,
        sample=sample,
        response_ids=np.empty(0, dtype=np.int64),
        finish_reason=FinishReason.ABORT,
        weight_versions=np.empty(0, dtype=np.int64),
        log_probs=none if request.sampling.log_probs else None,
        raw_log_probs=none if request.sampling.raw_log_probs else None,
    )


def do(job: Callable[[], T], future: Future[T]) -> None:
    """Run a job and set its result or error on the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:
        # The caller that submitted the job gets the error.
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise


def answer(futures: Iterable[Future[Any]], error: RolloutError | None) -> None:
    """Complete every future that was not cancelled: with `error` as its exception, or with the result None if `error` is None."""
    for future in futures:
        if not future.set_running_or_notify_cancel():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def rollout_error(what: str, cause: BaseException) -> RolloutError:
    """Return a RolloutError that names its cause."""
    error = RolloutError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def post(items: Sequence[tuple[Ticket, Completion | RolloutError]]) -> None:
    """Put samples and errors into the inboxes of their tickets (the submitted requests), with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Completion | RolloutError]]] = {}
    for ticket, item in items:
        by_loop.setdefault(ticket.loop, []).append((ticket, item))
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, mine)
        except RuntimeError:
            # The loop has been closed, so that no task waits for the items.
            continue


def _put(items: Sequence[tuple[Ticket, Completion | RolloutError]]) -> None:
    for ticket, item in items:
        ticket.inbox.put_nowait(item)
