"""WorkerGroup: N workers that run the same method together. Methods that the worker's class registers can be called on the group."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, NoReturn

import attrs

from dovetail.dispatch.future import Future
from dovetail.dispatch.mesh import Mesh
from dovetail.dispatch.profiling import labelled
from dovetail.dispatch.registration import registered_methods
from dovetail.errors import (
    DispatchError,
    DovetailError,
    NumericsError,
    UnregisteredMethodError,
    WorkerError,
    nearest,
)
from dovetail.interfaces.dispatch_mode import Call
from dovetail.workers.modes import resolve_mode


@attrs.frozen(kw_only=True, eq=False)
class RankFailure:
    """The result of a rank whose call raised an error."""

    error: Exception
    traceback: str
    """The worker's formatted traceback."""
    failed_at: float
    """Time of the failure, in seconds since 1970. The group raises the earliest failure: other ranks often fail as a consequence."""


def run_on_worker(worker: object, method: str, call: Call) -> Any:
    """Run one rank's call in the worker's process, and return its result or a RankFailure. Ctrl-C and requested stops are raised."""
    args, kwargs = call
    try:
        with labelled(worker, method):
            return getattr(worker, method)(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except Exception as error:  # noqa: BLE001 - a worker may raise anything; the group raises it again
        return RankFailure(error=error, traceback=traceback.format_exc(), failed_at=time.time())


class WorkerGroup(ABC):
    """Handle of the workers of one role.

    A method that the worker's class registers is called as `group.method(…)`, and returns a Future. The method's dispatch mode splits the
    arguments over the ranks, and collects the results.
    """

    def __init__(self, worker_class: type, mesh: Mesh, *, role: str = "") -> None:
        """Make the registered methods of a worker class callable on the group.

        Raises:
            DispatchError: a registered method has the name of an attribute of the group.
        """
        self.worker_class = worker_class
        self.mesh = mesh
        self.role = role or worker_class.__name__
        self.modes = registered_methods(worker_class)
        taken = sorted(self.modes.keys() & {*dir(type(self)), *vars(self)})
        if taken:
            raise DispatchError(
                f"the method {worker_class.__qualname__}.{taken[0]} can't be registered: "
                f"worker groups already have an attribute {taken[0]!r}; rename the method"
            )

    @abstractmethod
    def _invoke(self, method: str, calls: Sequence[Call | None]) -> Future[list[Any]]:
        """Run `run_on_worker` on every rank that has a call; results are in rank order, None for a rank without a call."""

    @abstractmethod
    def close(self) -> None:
        """Close every worker; safe to call twice."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a registered method on the workers.

        Returns:
            A future of the collected result. If ranks fail, it raises the error of the first: Dovetail's own errors keep their type and
            name their origin, any other error becomes a WorkerError.

        Raises:
            DispatchError: the method is not registered, or the arguments do not fit its mode.
        """
        if method not in self.modes:
            raise self._unregistered(method)
        mode = resolve_mode(self.modes[method])
        try:
            calls, receipt = mode.split(self.mesh, args, kwargs)
        except DispatchError as error:
            error.add_note(f"in {self.role}.{method}()")
            raise

        def finish(results: list[Any]) -> Any:
            self._raise_first_failure(method, results)
            return mode.collect(self.mesh, results, receipt)

        return self._invoke(method, calls).then(finish)

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        if name.startswith("_") or "modes" not in self.__dict__:
            raise AttributeError(name)
        if name not in self.modes:
            raise self._unregistered(name)
        function = getattr(self.worker_class, name)
        return update_wrapper(partial(self.call, name), function, ("__name__", "__doc__"))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.modes})

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.role}: {self.worker_class.__qualname__} on {self.mesh})"
        )

    def _unregistered(self, name: str) -> UnregisteredMethodError:
        near = nearest(name, self.modes)
        known = ", ".join(sorted(self.modes)) or "none"
        if hasattr(self.worker_class, name):
            message = f"the method {self.worker_class.__qualname__}.{name} is not registered, so a worker group can't call it"
        else:
            message = f"{self.worker_class.__qualname__} has no method {name!r}"
        return UnregisteredMethodError(
            f"{message}; its registered methods are: {known}",
            hint=f"did you mean {near!r}?"
            if near
            else "register it with @register(dispatch_mode=…)",
        )

    def _raise_first_failure(self, method: str, results: Sequence[Any]) -> None:
        failed = [
            (result.failed_at, rank, result)
            for rank, result in enumerate(results)
            if isinstance(result, RankFailure)
        ]
        if failed:
            _, rank, failure = min(failed, key=lambda entry: entry[:2])
            if isinstance(failure.error, NumericsError):
                failure.error.gather(result.error for _, _, result in failed)
            self._raise(method, rank, failure)

    def _raise(self, method: str, rank: int, failure: RankFailure) -> NoReturn:
        where = f"{self.role}.{method}() on rank {rank} of {self.mesh.size}"
        if isinstance(failure.error, DovetailError):
            failure.error.add_note(f"raised in {where}")
            if failure.error.__traceback__ is None:
                failure.error.add_note(failure.traceback)
            raise failure.error
        cause = "".join(traceback.format_exception_only(failure.error)).strip()
        error = WorkerError(
            f"{where} failed: {cause}",
            rank=rank,
            call=method,
            worker_traceback=failure.traceback,
        )
        if failure.error.__traceback__ is None:
            # The error comes from another process; pickling dropped its traceback.
            error.add_note(failure.traceback)
        raise error from failure.error
