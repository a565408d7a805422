"""Faults of a step that are said in words: too many failed rewards, an estimator that errs."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from dovetail.batch import Batch
from dovetail.errors import DovetailError, PluginBrokenError, RewardError
from dovetail.flow.generation import Sample
from dovetail.interfaces.advantage import AdvantageEstimator, Advantages, Groups
from dovetail.interfaces.reward import Failure


def check_failures(samples: Sequence[Sample], share: float, step: int, directory: Path) -> None:
    """Do nothing where enough samples have a score.

    Raises:
        RewardError: more than this share of the samples failed, or all of them.
    """
    failures = [s.outcome for s in samples if isinstance(s.outcome, Failure)]
    if not failures or (len(failures) <= share * len(samples) and len(failures) < len(samples)):
        return
    kinds = ", ".join(sorted({str(failure.kind) for failure in failures}))
    everything = len(failures) == len(samples)
    why = (
        "so there is nothing to learn from"
        if everything
        else f"more than reward.max_failure_share = {share:g} allows"
    )
    mend = "mend the reward function" + (
        "" if everything else ", or raise reward.max_failure_share"
    )
    raise RewardError(
        f"{len(failures)} of {len(samples)} samples of step {step} could not be scored ({kinds}), "
        f"{why}; the first: {failures[0].message}",
        hint=f"{mend}; every failure is in {directory / 'samples'}",
    )


def checked_estimate(estimator: AdvantageEstimator, batch: Batch, groups: Groups) -> Advantages:
    """The estimator's answer.

    Raises:
        PluginBrokenError: it raised, or returned something else; names the plugin, its file and line.
    """
    name = f"advantage {type(estimator).__name__!r}"
    try:
        result: object = estimator.estimate(batch, groups)
    except DovetailError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"
        raise PluginBrokenError(
            f"{name} raised {type(error).__name__}: {error} ({where})",
            hint="DOVETAIL_TRACEBACK=1 shows the whole traceback",
        ) from error
    if not isinstance(result, Advantages):
        raise PluginBrokenError(
            f"{name} returned {type(result).__name__}",
            hint="`estimate` returns dovetail.interfaces.Advantages(advantages=…)",
        )
    return result
