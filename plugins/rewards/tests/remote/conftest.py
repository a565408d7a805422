"""A runtime whose task workers are local processes, which can really hang, die and be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from dovetail.errors import WorkerError
from dovetail.interfaces import TaskSpec, TaskWorker

PROGRAM = str(Path(__file__).with_name("task_process.py"))


class LocalWorker(TaskWorker):
    """A process, with a thread that reads its answers."""

    def __init__(self, number: int, spec: TaskSpec, runtime: LocalRuntime) -> None:
        self._number, self._spec, self._runtime = number, spec, runtime
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, PROGRAM, spec.target, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.where = f"worker {number} (pid {self.process.pid})"
        self._socket, self._lock = ours, threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[bytes]] = {0: Future()}
        self._lost: str | None = None
        threading.Thread(target=self._read, daemon=True).start()
        self._send(spec.setup)
        self._waiting[0].result()

    @property
    def lost(self) -> str | None:
        return self._lost

    def call(self, payload: bytes) -> Future[bytes]:
        answer: Future[bytes] = Future()
        with self._lock:
            if self._lost is not None:
                answer.set_exception(WorkerError(self._lost))
                return answer
            number = next(self._numbers)
            self._waiting[number] = answer
        self._send(struct.pack("!I", number) + payload)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()

    def again(self) -> TaskWorker:
        self.kill()
        return self._runtime.start(self._number, self._spec)

    def _send(self, body: bytes) -> None:
        with contextlib.suppress(OSError):  # reading detects the process's end
            self._socket.sendall(struct.pack("!I", len(body)) + body)

    def _read(self) -> None:
        with contextlib.suppress(ConnectionError), self._socket.makefile("rb") as answers:
            while len(header := answers.read(4)) == 4:
                body = answers.read(struct.unpack("!I", header)[0])
                if len(body) < 4:
                    break
                self._waiting.pop(struct.unpack("!I", body[:4])[0]).set_result(body[4:])
        status = self.process.wait()
        with self._lock:
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            self._lost = f"{self.where} died: {how}"
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(WorkerError(self._lost))


class LocalRuntime:
    """The part of a runtime that a reward manager uses."""

    name = "local"
    capabilities = frozenset({"task_workers"})

    def __init__(self) -> None:
        self.workers: list[LocalWorker] = []
        """All started workers, in order."""
        self.specs: list[TaskSpec] = []

    def task_workers(self, spec: TaskSpec) -> list[TaskWorker]:
        self.specs.append(spec)
        return [self.start(number, spec) for number in range(spec.count)]

    def start(self, number: int, spec: TaskSpec) -> TaskWorker:
        self.workers.append(LocalWorker(number, spec, self))
        return self.workers[-1]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


@pytest.fixture
def runtime() -> Iterator[LocalRuntime]:
    """A runtime of local processes, which are ended after the test."""
    assert os.name == "posix"
    made = LocalRuntime()
    yield made
    made.close()
