"""Config classes of the plugins that run programs: the reward function `code`, and the tool `python`."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, PluginSection


@attrs.frozen(kw_only=True)
class SandboxSection(PluginSection):
    """Settings of the sandbox for untrusted programs."""

    time_limit: float = attrs.field(default=4.0, validator=ABOVE_ZERO)
    """CPU time limit of a program, in seconds. The wall-clock limit is three times as long plus 2 s, not counting the wait for a core."""
    memory_mb: int = attrs.field(default=1024, validator=attrs.validators.ge(32))
    """Maximum memory of a program, in MiB."""
    output_kb: int = attrs.field(default=1024, validator=AT_LEAST_ONE)
    """Maximum output of a program, in KiB; a program that prints more is ended."""
    processes: int = attrs.field(default=16, validator=AT_LEAST_ONE)
    """Maximum number of processes and threads of a program."""
    level: Literal["auto", "namespaces", "bubblewrap", "subprocess"] = "auto"
    """Isolation level of programs. auto takes namespaces or bubblewrap; if neither works, the run does not start. subprocess is weaker,
    for containers in which neither works.
    """
    python: str | None = None
    """Interpreter of the programs; None means the run's own interpreter. The interpreter's installed packages are not visible."""
    packages: tuple[str, ...] = ()
    """Directories with packages that programs may import, such as a virtual environment's site-packages."""
    preload: tuple[str, ...] = ()
    """Modules that are loaded once instead of by every program, such as `numpy`."""
    service: str | None = None
    """URL of a sandbox service that runs the programs instead of this machine, such as `http://sandbox:8080` (SandboxFusion's `/run_code`).
    """


@attrs.frozen(kw_only=True)
class CodeConfig(SandboxSection):
    """Settings of `code`, which runs the response's program on the row's test cases in a sandbox."""

    tests: Literal["separate_process", "in_process"] = "separate_process"
    """Process that runs assert tests. separate_process: a process that gets only plain data from the response's process; in_process: the
    response's process, in which the response can forge the test results.
    """
    scoring: Literal["all", "share"] = "all"
    """all: `score` if every test passes; testing stops at the first failure. share: `score` times the share of tests that pass."""
    score: float = 1.0
    """Score of a program that passes."""
    miss_score: float = 0.0
    """Score of a program that does not pass; with `scoring: share`, of a program that passes no test."""
    no_code_score: float = 0.0
    """Score of a response without a code block."""
    extract: Literal["fenced", "whole"] = "fenced"
    """fenced: the last fenced code block; whole: the whole response is the program."""
    max_tests: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum number of tests of a row: further tests are not run; None means all."""
    max_timeouts: int = attrs.field(default=2, validator=AT_LEAST_ONE)
    """With `scoring: share`: the number of tests that may time out before the remaining tests count as failed."""
    tolerance: float = attrs.field(default=1e-6, validator=NOT_NEGATIVE)
    """Allowed difference of numbers with a decimal point, absolute or relative to the expected number; 0 compares them as texts."""


@attrs.frozen(kw_only=True)
class PythonToolConfig(SandboxSection):
    """Settings of the tool `python`, which runs the policy's code in the sandbox."""
