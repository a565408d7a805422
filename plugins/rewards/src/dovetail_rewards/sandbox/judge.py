"""From the helper's report to a Result: what the program did, apart from what befell the sandbox."""

from __future__ import annotations

import os
import signal

from dovetail_rewards.sandbox.collect import OutputStreams
from dovetail_rewards.sandbox.errors import SandboxError, SandboxUnreachableError
from dovetail_rewards.sandbox.helper.wire import Report
from dovetail_rewards.sandbox.values import ProgramVerdict, Result

_LIMITS = {
    "cpu": ProgramVerdict.TIMEOUT,
    "wall": ProgramVerdict.TIMEOUT,
    "memory": ProgramVerdict.MEMORY,
    "disk": ProgramVerdict.DISK_LIMIT,
}
_CLOCKS = (signal.SIGXCPU, signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM)
"""Signals of timers: the kernel's for CPU time, and those that a program sets for itself."""


def result_from(report: Report, streams: OutputStreams, *, cut: bool) -> Result:
    """Return the result of a run.

    Args:
        report: the helper's report.
        streams: the program's output, read to the end.
        cut: whether the output exceeded its limit.

    Raises:
        SandboxError: the sandbox could not be set up.
        SandboxUnreachableError: the machine gave the program no core for many times its limit.
    """
    if report["fault"] is not None:
        errors = streams.stderr.decode("utf-8", "replace").strip()
        raise SandboxError(
            f"the sandbox could not be set up: {report['fault']}{f' ({errors})' if errors else ''}"
        )
    if report["ended"] == "starved":
        raise SandboxUnreachableError(
            f"a program got no core for most of {report['wall_s']:.0f} s: the machine is overloaded"
        )
    status = report["status"]
    verdict = _verdict(status, report, streams.stderr, cut=cut)
    by_signal = status is not None and os.WIFSIGNALED(status)
    return Result(
        verdict=verdict,
        exit_status=None if status is None or by_signal else os.WEXITSTATUS(status),
        signal=os.WTERMSIG(status) if status is not None and by_signal else None,
        stdout=streams.stdout,
        stderr=streams.stderr,
        cpu_s=report["cpu_s"],
        wall_s=report["wall_s"],
        peak_memory=report["peak_memory"],
    )


def _verdict(status: int | None, report: Report, stderr: bytes, *, cut: bool) -> ProgramVerdict:
    if cut:
        return ProgramVerdict.OUTPUT_LIMIT
    if status is None:
        return _LIMITS[report["ended"] or "wall"]
    if os.WIFSIGNALED(status):
        return ProgramVerdict.TIMEOUT if os.WTERMSIG(status) in _CLOCKS else ProgramVerdict.CRASHED
    if os.WEXITSTATUS(status) == 0:
        return ProgramVerdict.OK
    last = stderr.rstrip().rpartition(b"\n")[2]
    return ProgramVerdict.MEMORY if last.startswith(b"MemoryError") else ProgramVerdict.FAILED
