"""Messages between controller and worker processes besides calls: the set-up of a process, and its answers."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dovetail.workers import RankFailure


@attrs.frozen(kw_only=True)
class RoleEnvironment:
    """The Python environment of the processes of some roles."""

    title: str = ""
    """The config key that names the environment, for messages; empty for the controller's own environment."""
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict)
    """Ray's `runtime_env`, without `env_vars`."""
    env_vars: Mapping[str, str] = attrs.field(factory=dict)
    """Environment variables in addition to those of every process."""
    controller: Mapping[str, Any] | None = None
    """The controller's `EnvironmentInfo` as a mapping, which the process compares with its own environment."""
    plugins: Sequence[Mapping[str, Any]] = ()
    """The plugins that the processes load, as entries of the run's plugin lock."""


@attrs.frozen(kw_only=True)
class ProcessSetup:
    """The set-up of a process, sent before its first call."""

    label: str
    """Prefix of the process's files in `logs/`, `<label>-<rank>`."""
    rank: int
    """The process's rank in its pool, or the number of the rollout replica."""
    accelerator: bool
    """Whether the process computes on an accelerator."""
    working_directory: str
    """The controller's working directory, which relative paths of the config start from."""
    run_directory: str | None
    """Directory of `logs/`; None outside a run."""
    environment: dict[str, str]
    """Environment variables that must be set before torch is loaded."""
    threads: int
    """Number of CPU threads that the process computes with."""
    deterministic: bool
    """Whether the controller allows deterministic kernels only."""
    plugins: dict[str, Any] | None = None
    """The controller's plugins (from `plugins_here`), with which a process in its environment compares its own; None outside a run."""
    visible: tuple[str, ...] | None = None
    """Ids of the accelerators of a replica that has several; None leaves the choice to Ray."""
    spread: bool = False
    """Whether the run's processes are on several machines."""
    machine_rank: int = 0
    """Index of the rank among its pool's ranks on the same machine."""
    place: RoleEnvironment = attrs.field(factory=RoleEnvironment)
    """The Python environment of the process."""

    def runtime_env(self) -> dict[str, Any]:
        """Return Ray's description of the process's environment."""
        return {**self.place.runtime_env, "env_vars": {**self.environment, **self.place.env_vars}}


@attrs.frozen(kw_only=True)
class ProcessInfo:
    """The machine, interpreter and accelerators of a process."""

    pid: int
    host: str
    node: str
    """The node's address."""
    machine: str | None = None
    """Ray's id of the node, if the run's processes are on several nodes."""
    worker: str = ""
    """Ray's id of the process."""
    accelerators: tuple[str, ...] = ()
    """Ids of the accelerators that Ray assigned to the process."""
    executable: str = ""
    """The path of the process's Python interpreter."""

    def described(self) -> str:
        """Return the process as text, such as `pid 123 on host (10.0.0.1)`."""
        return f"pid {self.pid} on {self.host} ({self.node})"


@attrs.frozen(kw_only=True)
class Reply:
    """The answer of a process to a call."""

    result: Any
    """The codec's encoded result, or a `WireFailure`."""
    warnings: tuple[Mapping[str, Any], ...] = ()
    """Warnings that were logged during the call, for the controller's log."""


@attrs.frozen(kw_only=True)
class WireFailure:
    """A serialised error, for a process that may not be able to load the error's class."""

    pickled: bytes | None
    """The pickled exception; None if it can't be pickled."""
    text: str
    """The exception as text, `Type: message`."""
    traceback: str
    failed_at: float
    """Time of the failure, in seconds since the epoch."""

    @classmethod
    def of(cls, failure: RankFailure) -> WireFailure:
        """Pack a rank's failure, with its exception pickled if possible."""
        error = failure.error
        try:
            pickled: bytes | None = pickle.dumps(error)
            pickle.loads(pickled)  # type: ignore[arg-type]  # noqa: S301 - what was just written
        except Exception:  # noqa: BLE001 - an exception class may break in any way; its text travels
            pickled = None
        return cls(
            pickled=pickled,
            text="".join(traceback.format_exception_only(error)).strip(),
            traceback=failure.traceback,
            failed_at=failure.failed_at,
        )

    @classmethod
    def now(cls, error: Exception) -> WireFailure:
        """Pack an exception that is being handled."""
        return cls.of(
            RankFailure(error=error, traceback=traceback.format_exc(), failed_at=time.time())
        )

    def unpack(self) -> RankFailure:
        """Return the failure with its own exception, or with a `RemoteError` if the exception's class can't be loaded here."""
        error: Exception | None = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)  # noqa: S301 - from this run's own worker
            except Exception:  # noqa: BLE001 - its class is not here, or does not load; its text is
                error = None
        if error is None:
            error = RemoteError(self.text)
        error.__traceback__ = None
        return RankFailure(error=error, traceback=self.traceback, failed_at=self.failed_at)

    def raised_in(self, where: str) -> Exception:
        """Return the exception to raise in this process, with notes on where it was raised (`where`) and on its traceback there."""
        error = self.unpack().error
        error.add_note(f"raised in {where}")
        error.add_note(self.traceback)
        return error


class RemoteError(RuntimeError):
    """Replaces an exception whose class exists in the worker's process only."""
