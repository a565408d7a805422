"""The demo's reward, which fails for a fifth of all answers: always for the same ones, whatever the order of the calls."""

from __future__ import annotations

import zlib


def compute_score(
    data_source: str | None,  # noqa: ARG001 - the signature that reward functions have
    solution_str: str,
    ground_truth: str,
    extra_info: object = None,  # noqa: ARG001
) -> float:
    """1 where the answer ends in the right number, else 0.

    Raises:
        ConnectionError: for the answers that fail.
    """
    if zlib.crc32(f"{ground_truth} {solution_str}".encode()) % 5 == 0:
        raise ConnectionError("the judge does not answer")
    return float(solution_str.split()[-1:] == [str(ground_truth)])
