"""A worker process as its manager sees it: the process, its connection, and the samples that it was sent."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs

from dovetail.interfaces import Outcome
from dovetail_rewards.managers.wire import Garbled, frame, take_frames, unpack_outcome
from dovetail_rewards.managers.worker import READY

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from dovetail_rewards.managers.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
_numbers = itertools.count(1)


@attrs.define(eq=False)
class Job:
    """One sample to be scored."""

    sample: bytes
    """Pickled, as `wire.arguments_of`."""
    limit: float | None
    """Seconds that it may run."""
    answer: Callable[[Outcome], None]
    """Called once, in the keeper's thread."""
    name: str
    number: int = attrs.field(factory=lambda: next(_numbers))
    cancelled: bool = False


class WorkerProcess:
    """One worker. All methods are called from one thread, and none waits, but for `end`.

    Args:
        setup: what the worker makes its functions from.
    """

    def __init__(self, setup: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            path = [entry if isinstance(entry, str) else str(entry) for entry in sys.path]
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter with our own code
                [
                    sys.executable,
                    "-c",
                    _BOOT,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    json.dumps(path),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C is the manager's affair, and a kill takes children along
            )
        ours.setblocking(False)
        self.connection = ours
        self.ready = False
        self.jobs: OrderedDict[int, Job] = OrderedDict()
        self.since = time.monotonic()
        self._in = bytearray()
        self._out = bytearray(frame(setup))

    ready: bool
    """It has made its functions."""
    jobs: OrderedDict[int, Job]
    """Sent and not answered; the first is the one that it works on."""
    since: float
    """When it began with that one; before it is ready, when it was started."""

    @property
    def current(self) -> Job | None:
        """What it works on."""
        return next(iter(self.jobs.values()), None)

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def give(self, jobs: Sequence[Job]) -> None:
        """Send it more samples."""
        if not self.jobs:
            self.since = time.monotonic()
        self.jobs.update((job.number, job) for job in jobs)
        chunk = pickle.dumps([(job.number, job.sample) for job in jobs])
        self._out += frame(chunk)
        self.write()

    def write(self) -> None:
        """Send what the connection takes now."""
        with contextlib.suppress(BlockingIOError, OSError):  # its end shows in reading
            while self._out:
                del self._out[: self.connection.send(self._out)]

    def read(self) -> tuple[list[tuple[Job, Outcome, float]], str | None]:
        """What it has answered: jobs, outcomes and seconds of each; and why it can't go on, where it can't."""
        ended = None
        try:
            while part := self.connection.recv(1 << 20):
                self._in += part
            ended = "its connection closed"
        except BlockingIOError:
            pass
        except OSError as error:
            ended = str(error)
        answered: list[tuple[Job, Outcome, float]] = []
        try:
            for payload in take_frames(self._in):
                if not self.ready:
                    if payload != READY:
                        return answered, _start_problem(payload)
                    self.ready = True
                    continue
                answered.append(self._answered(payload))
        except Garbled as error:
            return answered, f"it sent what is no outcome ({error})"
        return answered, ended

    def _answered(self, payload: bytes) -> tuple[Job, Outcome, float]:
        number, outcome = unpack_outcome(payload)
        if number not in self.jobs:
            raise Garbled(f"an outcome of {number}, which it was not sent")
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        return self.jobs.pop(number), outcome, seconds

    def end(self, patience: float = 0.0) -> str:
        """End it, with its children, and say how it ended.

        Args:
            patience: seconds for it to end by itself, now that its connection closes.
        """
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        code = self.process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return describe_exit(code)


def describe_exit(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "was killed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _start_problem(payload: bytes) -> str:
    try:
        return str(json.loads(payload))
    except ValueError:
        return "it sent what is no greeting"
