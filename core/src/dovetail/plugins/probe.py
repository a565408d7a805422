"""Probing: importing plugins in a subprocess, so that not even a crash at import reaches the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dovetail.plugins.entry import PluginEntry

TIMEOUT = 120.0
"""Seconds that the plugins of one distribution may take to import."""


PluginKey = tuple[str, str, str]
"""Kind, name and distribution."""


@dataclass(frozen=True)
class ProbeResult:
    """Whether a plugin's class can be imported here."""

    loadable: bool
    cause: str | None = None
    fix: str | None = None
    for_want_of_needs: bool = False
    """It fails only because a need is unmet in this environment."""


def probe(entries: Iterable[PluginEntry], timeout: float = TIMEOUT) -> dict[PluginKey, ProbeResult]:
    """Import each usable plugin in a subprocess, one for each distribution, some at a time."""
    groups: dict[str, list[PluginEntry]] = {}
    for entry in entries:
        if entry.usable or entry.state == "conflict":
            groups.setdefault(entry.distribution, []).append(entry)
    results: dict[PluginKey, ProbeResult] = {}
    with ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        for part in pool.map(lambda group: _probe_distribution(group, timeout), groups.values()):
            results |= part
    return results


def key(entry: PluginEntry) -> PluginKey:
    """What a result is filed under."""
    return entry.kind, entry.name, entry.distribution


def with_probe(
    entries: Iterable[PluginEntry], results: dict[PluginKey, ProbeResult]
) -> list[PluginEntry]:
    """The entries with what the probe found; a cause takes the place of the missing reason."""
    probed = []
    for entry in entries:
        result = results.get(key(entry))
        if result is None:
            probed.append(entry)
        elif result.loadable:
            probed.append(replace(entry, probe="loadable"))
        else:
            probed.append(
                replace(
                    entry,
                    probe="broken",
                    reason=entry.reason or result.cause,
                    fix=entry.fix or result.fix,
                )
            )
    return probed


def _probe_distribution(
    entries: Sequence[PluginEntry], timeout: float
) -> dict[PluginKey, ProbeResult]:
    """Probe in order; after a crash, go on with the next plugin in a fresh process."""
    results: dict[PluginKey, ProbeResult] = {}
    remaining = list(entries)
    while remaining:
        lines, how_it_ended = _child(remaining, timeout)
        for entry, line in zip(remaining, lines, strict=False):
            results[key(entry)] = ProbeResult(**line)
        remaining = remaining[len(lines) :]
        if remaining and how_it_ended:
            results[key(remaining[0])] = ProbeResult(
                False, how_it_ended, f"report it to the author of {remaining[0].distribution}"
            )
            remaining = remaining[1:]
    return results


def _child(entries: Sequence[PluginEntry], timeout: float) -> tuple[list[dict[str, Any]], str]:
    """One result a line for as many plugins as the process lived through, and how it ended if early."""
    asked = json.dumps(
        {"path": sys.path, "plugins": [f"{e.kind}/{e.name}@{e.distribution}" for e in entries]}
    )
    with tempfile.TemporaryFile("w+") as answers, tempfile.TemporaryFile("w+") as noise:
        answers_fd = answers.fileno()
        try:
            code = subprocess.run(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "dovetail.plugins.probe_child", str(answers_fd)],
                input=asked,
                stdout=noise,
                stderr=noise,
                text=True,
                timeout=timeout,
                pass_fds=(answers_fd,),
                check=False,
            ).returncode
            ended = f"the process died at import with exit code {code}"
            if code < 0:
                ended = f"the process was killed at import by signal {-code}"
        except subprocess.TimeoutExpired:
            ended = f"its import took longer than {timeout:g} s"
        answers.seek(0)
        noise.seek(0)
        lines = [json.loads(line) for line in answers if line.endswith("\n")]
        last = noise.read().strip().splitlines()[-1:]
    return lines, ended + (f": {last[0]}" if last and len(lines) < len(entries) else "")
