"""Failed rewards of a step: how many are too many, and what caused them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import RewardError
from dovetail.interfaces import Failure, Sample


def too_many_failures(samples: Sequence[Sample], share: float) -> bool:
    """Return whether more than this share of the samples have no score, or none has one."""
    failures = sum(isinstance(s.outcome, Failure) for s in samples)
    return failures > share * len(samples) or (bool(failures) and failures == len(samples))


def check_failures(
    samples: Sequence[Sample], share: float, step: int, directory: Path, what: str = "samples"
) -> None:
    """Check that enough samples have a score.

    Args:
        samples: all of the step.
        share: `reward.max_failure_share`.
        step: for the message.
        directory: of the run, for the message.
        what: what they are, in the plural.

    Raises:
        RewardError: more than this share of the samples failed, or all of them.
    """
    if not too_many_failures(samples, share):
        return
    failures = [s.outcome for s in samples if isinstance(s.outcome, Failure)]
    everything = len(failures) == len(samples)
    why = (
        "so there is nothing to learn from"
        if everything
        else f"more than reward.max_failure_share = {share:g} allows"
    )
    fix = "correct the reward function" + (
        "" if everything else ", or raise reward.max_failure_share"
    )
    raise RewardError(
        f"{len(failures)} of {len(samples)} {what} of step {step} could not be scored, {why}:\n{causes(failures)}",
        hint=f"{fix}; every failure is in {directory / 'samples'}",
    )


def causes(failures: Sequence[Failure]) -> str:
    """Return a line for each kind of failure, the most frequent first: how many there are, and what the first of them says."""
    counts = Counter(failure.kind for failure in failures)
    lines = []
    for kind, count in counts.most_common():
        first = next(failure.message for failure in failures if failure.kind == kind)
        one = "" if count == 1 else ", the first"
        lines.append(f"  {count} {kind}{one}: {first.strip()}".replace("\n", "\n    "))
    return "\n".join(lines)
