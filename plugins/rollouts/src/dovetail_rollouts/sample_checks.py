"""Checks of a step's samples: enough must have a score. In the first step of a process, completions and outcomes must conform to their
interfaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dovetail.errors import RewardError
from dovetail.interfaces import Completion, Failure, Sample
from dovetail.plugins import broken_plugin, describe
from dovetail.sections import PluginSection
from dovetail_rollouts.scoring.scorer import BrokenAnswer

_ROUNDING = 1e-4
"""Tolerated excess of a log-probability over 0 due to rounding, in nats."""


def check_completions(samples: Iterable[Sample], section: PluginSection, longest: int) -> None:
    """Check every completion of a step.

    Args:
        samples: all samples of the step.
        section: the rollout's section, which names the plugin in the error.
        longest: the token limit of a response.

    Raises:
        PluginBrokenError: a completion violates BaseRollout's interface; the message names the plugin with its version.
    """
    for sample in samples:
        for completion in (*sample.earlier, sample.completion):
            if problem := _completion_problem(completion, longest):
                raise broken_plugin("rollout", section, f"sample {sample.sample_id!r}: {problem}")


def check_outcomes(samples: Iterable[Sample], section: PluginSection) -> None:
    """Check that the reward manager returned a valid outcome, a score or a failure, for every sample.

    Args:
        samples: scored samples.
        section: the reward manager's section, which names the plugin in the error.

    Raises:
        PluginBrokenError: the manager did not return a list with one Score or Failure for each sample; the message names the plugin with
            its version.
    """
    for sample in samples:
        if isinstance(sample.outcome, BrokenAnswer):
            raise broken_plugin("reward_manager", section, sample.outcome.message)


def too_many_failures(samples: Sequence[Sample], share: float) -> bool:
    """Return whether more than `share` of the samples, or all of them, have no score."""
    failures = sum(isinstance(s.outcome, Failure) for s in samples)
    return failures > share * len(samples) or (bool(failures) and failures == len(samples))


def check_failures(
    samples: Sequence[Sample], share: float, step: int, directory: Path, what: str = "samples"
) -> None:
    """Raise an error if too many samples have no score.

    Args:
        samples: all samples of the step.
        share: `reward.max_failure_share`.
        step: the step's number, for the message.
        directory: the directory of the run, for the message.
        what: the plural noun for the samples, for the message.

    Raises:
        RewardError: more than this share of the samples failed, or all samples failed.
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
        f"{len(failures)} of {len(samples)} {what} of step {step} could not be scored, {why}:\n{_causes(failures)}",
        hint=f"{fix}; every failure is in {directory / 'samples'}",
    )


def _causes(failures: Sequence[Failure]) -> str:
    """Return a line for each kind of failure, the most frequent first, with their number and the first message."""
    counts = Counter(failure.kind for failure in failures)
    lines = []
    for kind, count in counts.most_common():
        first = next(failure.message for failure in failures if failure.kind == kind)
        one = "" if count == 1 else ", the first"
        lines.append(f"  {count} {kind}{one}: {first.strip()}".replace("\n", "\n    "))
    return "\n".join(lines)


def _completion_problem(completion: Completion | None, longest: int) -> str | None:
    """Return what is wrong with a completion of T tokens; None if nothing is."""
    if completion is None:
        return "it has no completion"
    ids_T = completion.response_ids
    if not isinstance(ids_T, np.ndarray) or ids_T.dtype != np.int64 or ids_T.ndim != 1:
        return f"response_ids is {describe(ids_T)}, not int64 [T]"
    if len(ids_T) > longest:
        return f"it has {len(ids_T)} tokens; expected at most {longest}"
    versions_T = completion.weight_versions
    if (
        not isinstance(versions_T, np.ndarray)
        or versions_T.shape != ids_T.shape
        or versions_T.dtype != np.int64
    ):
        return f"weight_versions is {describe(versions_T)}, not int64 [{len(ids_T)}]"
    for name in ("log_probs", "raw_log_probs"):
        values_T = getattr(completion, name)
        if values_T is None:
            continue
        if not isinstance(values_T, np.ndarray) or values_T.shape != ids_T.shape:
            return f"{name} is {describe(values_T)}, not float32 [{len(ids_T)}]"
        if values_T.dtype != np.float32:
            return f"{name} is {describe(values_T)}, not float32 [{len(ids_T)}]"
        if (values_T > _ROUNDING).any():
            return f"{name} has the value {values_T.max():g}; expected at most 0"
    return None
