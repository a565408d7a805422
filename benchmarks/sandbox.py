"""Time of one code sample in the sandbox, against a bare subprocess of the same interpreter: `python benchmarks/sandbox.py`.

A sample is a small program that reads two numbers and prints their sum. Ways alternate run by run; medians are shown.
`bare` is `python -I -S -B solution.py` with its input and output in pipes and nothing else; `bare, with site` is what
`subprocess.run([sys.executable, …])` costs. `at once` is samples per second from as many threads as `--threads` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from dovetail_rewards.sandbox import Program, ProgramLimits, Sandbox, available_levels
from dovetail_rewards.sandbox.helper_process import default_python

SMALL = "a, b = map(int, input().split())\nprint(a + b)\n"
LARGER = (
    "import collections, heapq, itertools, math, functools, re, bisect, random, json\n"
    "from typing import List\n" + SMALL
)
STDIN = b"20 22\n"


def bare(flags: list[str], source: str, folder: str) -> Callable[[], bytes]:
    """A plain subprocess of the sandbox's interpreter."""
    path = Path(folder) / f"solution-{len(source)}.py"
    path.write_text(source)
    command = [default_python(), *flags, str(path)]
    return lambda: subprocess.run(command, input=STDIN, capture_output=True, check=True).stdout


def boxed(sandbox: Sandbox, source: str) -> Callable[[], bytes]:
    """A run in the sandbox."""
    program, limits = Program(source=source, stdin=STDIN), ProgramLimits()
    return lambda: sandbox.run(program, limits).stdout


def alternated(ways: dict[str, Callable[[], bytes]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each way, one run of each in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            if way() != b"42\n":
                raise SystemExit(f"{name} gave a wrong answer")
            times[name].append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def at_once(way: Callable[[], bytes], threads: int, samples: int) -> float:
    """Samples per second from several threads."""
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        for _ in pool.map(lambda _: way(), range(samples)):
            pass
        return samples / (time.perf_counter() - began)


def main() -> None:
    """Measure, and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="a line of JSON alone")
    options = parser.parse_args()
    levels = [report.level for report in available_levels() if report.available]
    sandboxes = {level: Sandbox(level=level) for level in levels}
    found: dict[str, object] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "rounds": options.rounds,
    }
    with TemporaryDirectory() as folder:
        for title, source in (("sum", SMALL), ("sum, ten imports", LARGER)):
            ways = {
                "bare": bare(["-I", "-S", "-B"], source, folder),
                "bare, with site": bare([], source, folder),
                **{level: boxed(sandbox, source) for level, sandbox in sandboxes.items()},
            }
            medians = alternated(ways, options.rounds)
            rates = {
                name: at_once(way, options.threads, options.rounds) for name, way in ways.items()
            }
            found[title] = {
                name: {"ms": round(medians[name], 2), "per_second": round(rates[name], 1)}
                for name in ways
            }
    for sandbox in sandboxes.values():
        sandbox.close()
    if options.json:
        print(json.dumps(found))
        return
    for title in ("sum", "sum, ten imports"):
        rows = found[title]
        assert isinstance(rows, dict)
        print(f"{title}\n{'way':<18}{'median ms':>10}{'over bare':>11}{'at once, per s':>16}")
        for name, row in rows.items():
            over = row["ms"] - rows["bare"]["ms"]
            print(f"{name:<18}{row['ms']:>10.2f}{over:>+11.2f}{row['per_second']:>16.1f}")
        print()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
