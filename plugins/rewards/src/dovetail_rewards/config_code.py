"""Config classes of the plugins that run programs: the reward function `code`, and the tool `python`."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import ABOVE_ZERO, AT_LEAST_ONE, NOT_NEGATIVE, PluginSection


@attrs.frozen(kw_only=True)
class SandboxSection(PluginSection):
    """Settings of the sandbox for untrusted programs."""

    time_limit: float = attrs.field(default=4.0, validator=ABOVE_ZERO)
    """Seconds of CPU a program may take; three times that and 2 s on the clock, without time spent waiting for a core."""
    memory_mb: int = attrs.field(default=1024, validator=attrs.validators.ge(32))
    """Memory of a program, in MiB."""
    output_kb: int = attrs.field(default=1024, validator=AT_LEAST_ONE)
    """Output of a program, in KiB; more ends it."""
    processes: int = attrs.field(default=16, validator=AT_LEAST_ONE)
    """Processes and threads of a program."""
    level: Literal["auto", "namespaces", "bubblewrap", "subprocess"] = "auto"
    """How programs are isolated; auto takes namespaces or bubblewrap, and where neither works the run does not start. subprocess is weaker, for containers."""
    python: str | None = None
    """Interpreter of the programs; None means this one. Its packages are not visible."""
    packages: tuple[str, ...] = ()
    """Directories with packages that programs may import, such as a virtual environment's site-packages."""
    preload: tuple[str, ...] = ()
    """Modules loaded once rather than by every program, such as `numpy`."""
    service: str | None = None
    """A sandbox service to use in place of this machine, such as `http://sandbox:8080` (SandboxFusion's `/run_code`)."""


@attrs.frozen(kw_only=True)
class CodeConfig(SandboxSection):
    """The response's program passes the row's test cases, in a sandbox."""

    tests: Literal["separate_process", "in_process"] = "separate_process"
    """Where assert tests run: in a process other than the response's, which gets plain data from it; or in the response's own, which can forge their outcome."""
    scoring: Literal["all", "share"] = "all"
    """all: `score` where every test passes, and it stops at the first that does not; share: `score` times the share of tests that pass."""
    score: float = 1.0
    """Score of a program that passes."""
    miss_score: float = 0.0
    """Score of a program that does not pass; with share, of one that passes no test."""
    no_code_score: float = 0.0
    """Score of a response without a code block."""
    extract: Literal["fenced", "whole"] = "fenced"
    """fenced: the last fenced code block; whole: the whole response is the program."""
    max_tests: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """The number of a row's tests that are run, from the first; None means all."""
    max_timeouts: int = attrs.field(default=2, validator=AT_LEAST_ONE)
    """With share: the number of tests that may run out of time before the remaining ones count as failed."""
    tolerance: float = attrs.field(default=1e-6, validator=NOT_NEGATIVE)
    """Numbers with a decimal point may differ by so much, absolutely or relative to the expected one; 0 compares texts."""


@attrs.frozen(kw_only=True)
class PythonToolConfig(SandboxSection):
    """Settings of the tool `python`."""
