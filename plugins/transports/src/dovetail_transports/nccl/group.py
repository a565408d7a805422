"""BroadcastGroup: the sender and its receivers as a process group of their own, beside any default group.

Torch's NCCL watchdog ends the process when a peer fails. A failed weight update can be sent again instead, so the watchdog
is turned off for this group, and a wait polls with a time limit of its own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.workers import environment_variables
from dovetail_transports.ring.slots import DeliveryError, Pulse

T = TypeVar("T")
_c10d: Any = dist

_SPIN_SECONDS = 0.002
_POLL_SECONDS = 0.0005
_ABORT_SECONDS = 10.0
_WATCHDOG_FACTOR = 10.0
"""Ratio of torch's time limit to this module's time limit, so that this module's limit always ends a wait first."""
_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables that torch reads when it makes a group, so that no watchdog or monitor ends this process."""
_environment = threading.Lock()
"""Lock on environment variables, which the whole process shares: two groups made at once would restore wrong values."""


class BroadcastGroup:
    """Process group in which rank 0 broadcasts. All members construct their `BroadcastGroup` at the same time.

    Args:
        backend: `nccl` or `gloo`.
        store: a function that makes this process's end of the store through which the members find each other.
        rank: this process's rank, 0 for the sender.
        size: number of processes.
        device: the device of the tensors.
        host: the address that gloo listens at.
        timeout: seconds that forming the group and each broadcast may take.
        pulse: a function, called while waiting, that raises if the other members won't join.

    Raises:
        DeliveryError: the group could not be formed.
    """

    def __init__(
        self,
        *,
        backend: str,
        store: Callable[[], Any],
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        timeout: float,
        pulse: Pulse,
    ) -> None:
        self._device, self._timeout, self._size = device, timeout, size
        self._aborted = threading.Event()

        def make() -> Any:
            found = store()
            with _on(device):
                group = _nccl(found, rank, size, timeout) if backend == "nccl" else None
                group = group or _gloo(found, rank, size, timeout, host)
                # NCCL connects only at the first collective, which is made here so that an unreachable peer gets its own error.
                first = _broadcast(group, torch.zeros(1, dtype=torch.uint8, device=device))
                self._await(first, _nothing)  # the thread that waits below calls `pulse`
            return group, found

        try:
            self._group, self._store = in_time(make, pulse, timeout)
        except (RuntimeError, TimeoutError) as error:
            self._aborted.set()
            if isinstance(error, WeightSyncError):
                raise
            raise DeliveryError(
                f"the {backend} group of the sender and {size - 1} receiver(s) can't be created: "
                f"{error or f'some did not join within {timeout:g} seconds'}",
                hint="give every process a GPU of its own and a network interface that all processes reach "
                "(NCCL_SOCKET_IFNAME, NCCL_DEBUG=WARN); on the same GPU set rollout.weight_transport=cuda_ipc",
            ) from error

    def broadcast(self, octets: Tensor, pulse: Pulse) -> None:
        """Send the sender's bytes, uint8 [n] on every member, to all members, and wait for the end of the transfer.

        Raises:
            DeliveryError: the broadcast failed, took too long, or was aborted.
        """
        if self._aborted.is_set():
            raise DeliveryError(
                "the process group of the sender and its receivers has been aborted"
            )
        try:
            with _on(self._device):
                self._await(_broadcast(self._group, octets), pulse)
        except RuntimeError as error:
            if isinstance(error, WeightSyncError):
                raise
            raise DeliveryError(
                f"a bucket of weights can't be broadcast to the receivers: {error}"
            ) from error

    def abort(self) -> None:
        """Abort the group; a running broadcast of another thread fails. Safe to call twice."""
        if self._aborted.is_set():
            return
        self._aborted.set()
        group, self._group, self._store = self._group, None, None
        # Aborting may wait for lost peers, and so may the destruction of a group during a broadcast.
        with suppress(TimeoutError, RuntimeError):
            in_time(lambda: _bury(group), _nothing, _ABORT_SECONDS)

    def _await(self, work: Any, pulse: Pulse) -> None:
        began = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - began
            if self._aborted.is_set():
                raise DeliveryError("the update was cancelled during the transfer of a bucket")
            if waited > self._timeout:
                raise DeliveryError(
                    f"a bucket did not reach all receivers ({self._size - 1}) within {self._timeout:g} seconds"
                )
            if waited > _SPIN_SECONDS:
                pulse()
                time.sleep(_POLL_SECONDS)
        # Raises gloo's error. With NCCL, `wait` only orders streams, and no call reports a failure; receivers notice a failure
        # by their digests, and the sender by their answers.
        work.wait()


def store_at(host: str, listener: socket.socket, timeout: float) -> Any:
    """Start the sender's key-value store, listening on this socket only; the store closes the socket."""
    port = listener.getsockname()[1]
    # The store does not wait for the receivers, which get the offer with this address only afterwards.
    return _c10d.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def store_there(host: str, port: int, timeout: float) -> Any:
    """Return a receiver's connection to the sender's store, which `store_at` started."""
    return _c10d.TCPStore(host, port, None, False, timedelta(seconds=timeout))


def in_time(act: Callable[[], T], pulse: Pulse, timeout: float) -> T:
    """Return the result of a function that can't be interrupted. It runs in a thread, which is abandoned if it takes too long.

    Raises:
        TimeoutError: the function took longer than `timeout`.
        Exception: an exception of `act` or `pulse`.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            outcome.set_exception(error)

    # A daemon thread, since a call into NCCL may never return, and must not keep the process from ending.
    threading.Thread(target=run, daemon=True, name="broadcast-group").start()
    deadline = time.monotonic() + timeout
    while not outcome.done():
        pulse()
        if time.monotonic() > deadline:
            raise TimeoutError
        with suppress(FutureTimeoutError):
            outcome.exception(0.02)
    return outcome.result()


def _gloo(store: object, rank: int, size: int, timeout: float, host: str) -> Any:
    kind = _c10d.ProcessGroupGloo
    options = kind._Options()  # noqa: SLF001 - torch gives it no other name
    options._timeout = timedelta(seconds=timeout)  # noqa: SLF001
    options._devices = [kind.create_device(hostname=host)]  # noqa: SLF001
    return kind(store, rank, size, options)


def _nccl(store: object, rank: int, size: int, timeout: float) -> Any:
    kind = _c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout * _WATCHDOG_FACTOR)  # noqa: SLF001
    # With these variables, torch leaves the failures of the group to this module.
    with _environment, environment_variables(_WATCHDOG):
        return kind(store, rank, size, options)


def _broadcast(group: Any, octets: Tensor) -> Any:
    options = _c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([octets], options)


def _nothing() -> None:
    """Do nothing, as a pulse that never raises."""


def _bury(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()


def _on(device: torch.device) -> Any:
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
