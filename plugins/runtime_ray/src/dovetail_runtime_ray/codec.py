"""What a call on a Ray worker group carries: the two ends of a codec. `columns.py` has both.

A call goes through four steps, in this order:

1. `DriverCodec.encode(calls)` in the controller: one payload a rank, None where the rank has no call.
2. `WorkerCodec.decode(payload)` in each rank's process, in the thread that runs the call: the rank's arguments.
3. `WorkerCodec.encode_result(result)` in the same thread: what goes back.
4. `DriverCodec.decode_results(results)` in the controller: the ranks' results in rank order.

Payloads and encoded results are pickled by Ray (protocol 5, so that NumPy buffers are not copied, and arrive
read-only). They travel inside a container, never as a bare argument: an `ObjectRef` within a payload reaches the
worker as a reference, and Ray fetches nothing unasked. A failed call's `RankFailure` goes round the worker's codec
and is among the `results` of `decode_results`, as is the None of a rank without a call; both pass through unchanged.
What `decode` or `encode_result` raises is reported as that rank's failure.

A runtime has one `DriverCodec` for all its groups, made by `driver_codec()` after Ray is connected, and every host
process has one `WorkerCodec`, made by `worker_codec()`. Calls come from several threads of the controller at once,
and a host process may run calls of two roles at the same time; both ends must bear that. `close` drops whatever is
held; calls are over by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dovetail.interfaces import Call
from dovetail_runtime_ray.columns import BatchCodec


class DriverCodec(Protocol):
    """The controller's end."""

    def encode(self, calls: Sequence[Call | None]) -> list[Any]:
        """One payload a rank, in rank order; None where there is no call. Calls may share argument objects."""
        ...

    def decode_results(self, results: Sequence[Any]) -> list[Any]:
        """The ranks' results, from what their `encode_result` made; None and `RankFailure` pass unchanged."""
        ...

    def close(self) -> None:
        """Drop what is held."""
        ...


class WorkerCodec(Protocol):
    """A host process's end."""

    def decode(self, payload: Any) -> Call:
        """This rank's arguments; arrays in them may be read-only."""
        ...

    def encode_result(self, result: Any) -> Any:
        """What to send back for a result."""
        ...

    def close(self) -> None:
        """Drop what is held."""
        ...


def driver_codec() -> DriverCodec:
    """The controller's end that the runtime uses."""
    return _codec()


def worker_codec() -> WorkerCodec:
    """The end that a host process uses."""
    return _codec()


def _codec() -> BatchCodec:
    from dovetail_runtime_ray.store import RayStore

    return BatchCodec(RayStore())
