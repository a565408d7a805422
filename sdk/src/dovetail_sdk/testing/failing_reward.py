"""A reward that fails on demand: it raises, hangs, or returns an invalid value."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.interfaces import GroundTruth

LONGEST_HANG = 60.0
"""Seconds after which a hung call ends by itself, if it is not released."""

_release = threading.Event()


def compute_score(
    data_source: str | None,  # noqa: ARG001 - the parameters of every reward function
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: Mapping[str, Any] | None = None,
) -> Any:
    """Fail in the way that `extra_info["fail"]` names (see FAILURES and PROCESS_FAILURES); without it, return 1.0 if the response is
    the ground truth, else 0.0.

    Selected in a config by file: `reward.function: {path: …/failing_reward.py, attribute: compute_score}`.
    """
    how = (extra_info or {}).get("fail")
    if how is not None:
        return (FAILURES | PROCESS_FAILURES)[how]()
    return float(solution_str.strip() == str(ground_truth).strip())


def compute_scores(
    data_sources: list[str | None],
    solution_strs: list[str],
    ground_truths: list[Any],
    extra_infos: list[Mapping[str, Any] | None],
) -> Any:
    """Score lists as `compute_score` scores one sample; `extra_info["fail"]` may also name one of LIST_FAILURES to fail the whole call."""
    rows = list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))
    for row in rows:
        how = (row[3] or {}).get("fail")
        if how in LIST_FAILURES:
            return LIST_FAILURES[how](len(rows))
    return [compute_score(*row) for row in rows]


def release_hung() -> None:
    """End every hanging call; later calls can hang again. Call this at the end of a test."""
    _release.set()
    _release.clear()


def _raise() -> float:
    raise ValueError("a reward that fails on demand")


def _hang() -> float:
    _release.wait(LONGEST_HANG)
    return 1.0


def _refuse() -> float:
    raise ConnectionRefusedError("no judge model answers at this address")


def _exit() -> float:
    sys.exit(3)


def _spin() -> float:
    """Loop forever, and block every signal that can be blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        pass


FAILURES: dict[str, Callable[[], Any]] = {
    "exception": _raise,
    "hang": _hang,
    "exit": _exit,
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "text": lambda: "1.0",
    "none": lambda: None,
    "unreachable": _refuse,
    "list": lambda: [1.0],
    "mapping_without_score": lambda: {"reward": 1.0},
    "mapping_with_nan": lambda: {"score": math.nan, "format": 1.0},
}
"""Functions that raise an exception, hang, or return a value that is no valid score, by the name of the failure."""

PROCESS_FAILURES: dict[str, Callable[[], Any]] = {
    "crash": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), 9),
    "spin": _spin,
}
"""Functions that end their process, or block it until it is killed (`spin`), by the name of the failure: only for managers that run
functions in processes of their own."""
LIST_FAILURES: dict[str, Callable[[int], Any]] = {
    "too_few": lambda count: [1.0] * (count - 1),
    "too_many": lambda count: [1.0] * (count + 1),
    "one_number": lambda count: 1.0,  # noqa: ARG005
}
"""Invalid results in place of a list of rewards, by the name of the failure, each made from the number of rewards that are expected."""
