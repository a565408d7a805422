"""Every error that Dovetail raises on purpose: one hierarchy, picklable, each also a standard type.

A message says what was wrong, the value, what is allowed or nearest, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

_INFRASTRUCTURE = 75
"""Exit code of a failure of processes, machines, disks or the network, after which the same command may work (`EX_TEMPFAIL` of sysexits.h)."""


class DovetailError(Exception):
    """Base of all of Dovetail's errors.

    Args:
        message: the description of the error, with the offending value.
        hint: how to fix it; printed on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message

    def during(self, what: str) -> None:
        """Prefix the message with the running operation, such as `step 3`."""
        if not self.message.startswith(f"{what}: "):
            self.message = f"{what}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__))


def _rebuild(cls: type[DovetailError], fields: dict[str, object]) -> DovetailError:
    """Restore an error in another process without calling a subclass's own constructor."""
    error = cls.__new__(cls)
    Exception.__init__(error, fields["message"])
    error.__dict__.update(fields)
    return error


class ConfigError(DovetailError, ValueError):
    """The config is wrong; `problems` holds every complaint found, each a full sentence."""

    exit_code = 2
    lists_problems = False
    """Whether the message already lists the problems, so that they are not printed a second time."""

    def __init__(
        self, message: str, *, hint: str | None = None, problems: Iterable[str] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class PluginError(DovetailError):
    """Base of all errors of plugins."""

    exit_code = 2


class PluginNotFoundError(PluginError, LookupError):
    """No installed plugin of the kind has the requested name."""


class PluginConflictError(PluginError, LookupError):
    """Two distributions declare a plugin of the same name."""


class PluginIncompatibleError(PluginError, RuntimeError):
    """The plugin is installed but made for another interface version or Python, or its manifest is wrong."""


class PluginBrokenError(PluginError, ImportError):
    """The plugin is installed and compatible, but can't be imported or violates its interface."""


class PluginNeedsError(PluginError, ImportError):
    """The plugin needs a package or hardware that this environment lacks."""


class PlanError(DovetailError, ValueError):
    """The chosen plugins and sizes do not form a valid step: a requirement is unmet, or numbers of rows or ranks contradict each other."""

    exit_code = 2


class DataError(DovetailError, ValueError):
    """A dataset is missing, empty, unreadable, or has a bad row."""

    exit_code = 2


class ModelError(DovetailError, OSError):
    """A model or tokenizer can't be loaded."""

    exit_code = 2


class ColumnError(DovetailError, ValueError):
    """A batch lacks a column, or a column has the wrong length, dtype or shape."""


class NumericsError(DovetailError, ArithmeticError):
    """A value, a loss or a gradient is not finite, or rollout and trainer differ by more than the config allows.

    No optimizer step was taken with these values.

    Attributes:
        sample_ids: ids of the samples that caused the error, as far as known.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, hint: str | None = None, sample_ids: Iterable[str] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.sample_ids = tuple(sample_ids)

    def gather(self, others: Iterable[Exception]) -> None:
        """Add the sample ids of other ranks' numerics errors: each rank knows only its own samples."""
        found = [e for e in others if isinstance(e, NumericsError) and e.sample_ids]
        if found:
            # A rank that names samples also has the more specific message.
            self.message = self.message if self.sample_ids else found[0].message
            names = [name for error in (self, *found) for name in error.sample_ids]
            self.sample_ids = tuple(dict.fromkeys(names))


class DispatchError(DovetailError, ValueError):
    """A dispatch mode, a mesh or a call on a worker group is wrong."""


class UnregisteredMethodError(DispatchError, AttributeError):
    """A method called on a worker group is not registered by the workers' class."""


class PlacementError(DovetailError, RuntimeError):
    """The runtime lacks what the workers need: accelerators, CPUs or nodes, or a cluster."""

    exit_code = 2


class WorkerError(DovetailError, RuntimeError):
    """A call on a worker group failed; carries the first failing rank and its traceback.

    Attributes:
        rank: the first failing rank.
        call: the method that was called.
        worker_traceback: the worker's formatted traceback.
        exit_code: 75 if the worker's process is gone or did not answer in time (constructor argument `lost`), else 1.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = 0,
        call: str = "",
        worker_traceback: str = "",
        hint: str | None = None,
        lost: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        if lost:
            self.exit_code = _INFRASTRUCTURE
        self.rank = rank
        self.call = call
        self.worker_traceback = worker_traceback


class RolloutError(DovetailError, RuntimeError):
    """A generation engine failed."""

    exit_code = _INFRASTRUCTURE


class RequestRefusedError(RolloutError, ValueError):
    """An engine refuses a request; neither a retry nor a restart would help."""

    exit_code = 1


class ToolError(DovetailError, RuntimeError):
    """A tool call failed; the policy is shown the message as an observation."""


class RewardError(DovetailError, RuntimeError):
    """Scoring failed for more samples than the config tolerates, or a reward is unusable."""


class WeightSyncError(DovetailError, RuntimeError):
    """Weights did not arrive as they were sent."""


class ReceiverError(WeightSyncError):
    """Rollout engines that receive weights failed during a weight update.

    The sender is unaffected: once the engines are restarted, it can send the update again.
    """

    exit_code = _INFRASTRUCTURE


class CalledOffError(ReceiverError):
    """A weight update was cancelled before its first byte: a rollout engine will not connect. The other engines keep their weights."""


class CheckpointError(DovetailError, OSError):
    """A checkpoint can't be written or read."""


class DiskFullError(CheckpointError):
    """The disk has no room for a checkpoint."""

    exit_code = _INFRASTRUCTURE


class RunDirectoryError(DovetailError, FileExistsError):
    """The run directory holds another run, does not exist, or can't be read or written."""

    exit_code = 2


class LedgerError(DovetailError, RuntimeError):
    """A prompt was lost or used twice."""


class StopRequested(DovetailError, KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP: the run stopped cleanly and was saved. The exit code is 128 + the signal's number."""

    exit_code = 130


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, even if the causes form a cycle."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is each for each in seen):
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Return the known name most similar to a misspelt one, ignoring case; None if no similarity reaches `cutoff` (0 to 1)."""
    folded = {spelling.casefold(): spelling for spelling in known}
    matches = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=cutoff)
    return folded[matches[0]] if matches else None


def listed(samples: Sequence[str], shown: int = 5) -> str:
    """Return sample ids as text: at most the first `shown`, then the number of omitted ids."""
    first = ", ".join(samples[:shown])
    more = f" and {len(samples) - shown} more" if len(samples) > shown else ""
    return f"sample{'s' if len(samples) != 1 else ''} {first}{more}"
