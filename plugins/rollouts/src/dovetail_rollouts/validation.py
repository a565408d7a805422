"""Validation: samples to held-out prompts, their metrics over all and by data source, bootstrap intervals, and the run's accuracy.

Legend: P prompts, M samples a prompt, K metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import attrs
import numpy as np
from jaxtyping import Bool, Float64, Int64

from dovetail.interfaces import Failure, Logger, Prompt, Sample, Score
from dovetail.sections import RunConfig
from dovetail_rollouts.group import Group
from dovetail_rollouts.resampling import (
    best_at_k,
    bootstrap_intervals,
    majority_at_k,
    pass_at_k,
    powers_up_to,
)
from dovetail_rollouts.rollout_service import RolloutService
from dovetail_rollouts.sampling import validation_sampling
from dovetail_rollouts.scoring.reward_calls import ANSWER

CORRECT = ("acc", "accuracy", "correct")
"""Names of the reward component that says whether a response is correct."""
BESIDES = ("val/failures", "val/response_length/mean")
"""Validation metrics that are not computed from scores."""
_NO_ANSWER = -1


def held_out_samples(
    config: RunConfig,
    prompts: Sequence[Prompt],
    service: RolloutService,
    generated: Callable[[], None] | None = None,
) -> list[Sample]:
    """Generate and score `rollout.validation.n` samples for each prompt, `data.val_batch_size` prompts at once.

    Args:
        config: the config of the run.
        prompts: the held-out prompts.
        service: the service that generates and scores.
        generated: a function that is called after each batch of prompts.
    """
    n, sampling = config.rollout.validation.n, validation_sampling(config)
    size = config.data.val_batch_size or len(prompts)
    samples: list[Sample] = []
    for start in range(0, len(prompts), size):
        groups = [
            Group(prompt=prompt, n=n, sampling=sampling, purpose="validation")
            for prompt in prompts[start : start + size]
        ]
        service.generate(groups)
        if generated is not None:
            generated()
        samples += [sample for group in groups for sample in group.samples]
    return samples


def unscored(samples: Sequence[Sample]) -> str | None:
    """Return a warning if some responses of a validation have no score; None if all have a score."""
    failures = [s.outcome for s in samples if isinstance(s.outcome, Failure)]
    if not failures:
        return None
    responses = len(samples)
    counts = Counter(failure.kind.value for failure in failures)
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    why = f"({kinds}); the first error: {failures[0].message}"
    if len(failures) == responses:
        return f"validation has no metrics: none of its {responses} responses could be scored {why}"
    return f"a validation leaves out {len(failures)} of its {responses} responses, which could not be scored {why}"


@attrs.frozen(eq=False)
class _Prompts:
    """The scored samples of P prompts, one row a prompt, left-aligned; M is the most samples of a prompt."""

    source_P: list[str]
    sizes_P: Int64[np.ndarray, "P"]
    scores_PM: Float64[np.ndarray, "P M"]
    right_P: Float64[np.ndarray, "P"]
    """For each prompt, the sum over its samples of the component that says whether a sample is correct; NaN if a sample lacks it."""
    passed_P: Int64[np.ndarray, "P"]
    answers_PM: Int64[np.ndarray, "P M"]
    """Index of each sample's answer among the distinct answers to its prompt; −1 for no answer."""


def validation_metrics(
    samples: Sequence[Sample], n: int, *, seed: int = 0, pass_threshold: float = 0.5
) -> dict[str, float]:
    """Return metrics of scored samples: `val/<metric>` over all prompts, `val/<data_source>/<metric>` for each data source.

    Every metric is a mean over prompts. `<metric>/low` and `<metric>/high` are the ends of its 95% bootstrap interval
    (1,000 resamples of prompts). k is 1, 2, 4, … and n.

    - `mean@n`: mean score of a prompt's samples.
    - `acc@n`: mean of the component `acc`, `accuracy` or `correct`, if every sample of the data source has one; over all
      prompts only if every data source has it.
    - `best@k`: expected best score of k samples.
    - `pass@k`: unbiased probability that one of k samples passes (arXiv 2107.03374). A sample passes if its component
      `acc`, `accuracy` or `correct`, or else its score, is at least `pass_threshold`.
    - `majority@k`: expected score of the answer that most of k samples give, if the data source's reward function
      returns `pred`; over all prompts only if every data source's function does.

    A sample whose scoring failed counts in `val/failures` alone. Its prompt's metrics come from the remaining samples,
    with k at most their number. A prompt without scored samples counts in no metric.

    Args:
        samples: the samples of all held-out prompts, in any order.
        n: number of requested responses per prompt.
        seed: the seed of the draws for intervals and majority@k, so that equal samples give equal metrics.
        pass_threshold: the least score that passes.
    """
    scored = [sample for sample in samples if isinstance(sample.outcome, Score)]
    metrics = {"val/failures": float(len(samples) - len(scored))}
    if scored:
        prompts = _by_prompt(scored, pass_threshold)
        figures = _figures(prompts, n, np.random.default_rng(seed))
        votes = {s.prompt.data_source or "" for s in scored if ANSWER in _extras(s)}
        sources = sorted(set(prompts.source_P))
        for source in sources:
            if source:
                chosen_P = np.array([s == source for s in prompts.source_P])
                metrics |= _means(f"val/{source}", figures, chosen_P, seed, votes=source in votes)
        everywhere_P = np.ones(len(prompts.source_P), dtype=np.bool_)
        metrics |= _means("val", figures, everywhere_P, seed, votes=votes.issuperset(sources))
    lengths = [sample.response_length for sample in samples]
    if lengths:
        metrics["val/response_length/mean"] = float(np.mean(lengths))
    return metrics


def figure_names(n: int) -> list[str]:
    """Return the names of validation metrics for n responses per prompt, such as `mean@8` and `pass@4`, without `val/` or data source."""
    kinds = ("best", "pass", "majority")
    return [f"mean@{n}", f"acc@{n}", *(f"{kind}@{k}" for kind in kinds for k in powers_up_to(n))]


def metric_names(n: int, sources: Iterable[str] = ()) -> list[str]:
    """Return the names of all metrics that a validation with n responses per prompt may report, for these data sources and over all."""
    figures = [
        f"val/{source}/{name}" if source else f"val/{name}"
        for source in ("", *sources)
        for name in figure_names(n)
    ]
    return [*figures, *(f"{name}/{end}" for name in figures for end in ("low", "high")), *BESIDES]


def main_metric(metrics: Mapping[str, float], n: int) -> str:
    """Return the name of a validation's metric for the run's summary: the accuracy, or the mean score if the reward has no accuracy."""
    accuracy = f"val/acc@{n}"
    return accuracy if accuracy in metrics else f"val/mean@{n}"


def _by_prompt(scored: Sequence[Sample], pass_threshold: float) -> _Prompts:
    by_prompt: dict[int, list[Sample]] = {}
    for sample in scored:
        by_prompt.setdefault(sample.prompt.index, []).append(sample)
    rows = list(by_prompt.values())
    shape = len(rows), max(map(len, rows))
    scores_PM = np.zeros(shape)
    answers_PM = np.full(shape, _NO_ANSWER, dtype=np.int64)
    for p, row in enumerate(rows):
        scores_PM[p, : len(row)] = [sample.score for sample in row]
        answers_PM[p, : len(row)] = _numbered([_answer(sample) for sample in row])
    right = [sum(_right(sample) for sample in row) for row in rows]
    passed = [sum(_passes(sample, pass_threshold) for sample in row) for row in rows]
    return _Prompts(
        source_P=[row[0].prompt.data_source or "" for row in rows],
        sizes_P=np.array([len(row) for row in rows], dtype=np.int64),
        scores_PM=scores_PM,
        right_P=np.array(right, dtype=np.float64),
        passed_P=np.array(passed, dtype=np.int64),
        answers_PM=answers_PM,
    )


def _figures(
    prompts: _Prompts, n: int, rng: np.random.Generator
) -> dict[str, Float64[np.ndarray, "P"]]:
    """Return each metric's value for every prompt: mean@n and acc@n, and best@k, pass@k and majority@k for k = 1, 2, 4, … and n.

    `rng` draws the samples of majority@k.
    """
    ks = powers_up_to(n)
    sizes_P = prompts.sizes_P
    figures = {f"mean@{n}": prompts.scores_PM.sum(1) / sizes_P}
    figures[f"acc@{n}"] = prompts.right_P / sizes_P
    figures |= {f"best@{k}": best_at_k(prompts.scores_PM, sizes_P, k) for k in ks}
    figures |= {f"pass@{k}": pass_at_k(prompts.passed_P, sizes_P, k) for k in ks}
    majority_KP = majority_at_k(prompts.scores_PM, prompts.answers_PM, sizes_P, ks, rng)
    return figures | {f"majority@{k}": row_P for k, row_P in zip(ks, majority_KP, strict=True)}


def _means(
    prefix: str,
    figures: Mapping[str, Float64[np.ndarray, "P"]],
    chosen_P: Bool[np.ndarray, "P"],
    seed: int,
    *,
    votes: bool,
) -> dict[str, float]:
    """Return the means over the chosen prompts and their intervals, for metrics that every chosen prompt has.

    Args:
        prefix: the prefix of the metrics' names: `val`, or `val/` and the data source.
        figures: the value of each metric for every prompt.
        chosen_P: whether a prompt counts.
        seed: the seed of the intervals.
        votes: whether to report `majority@k`.
    """
    names = [
        name
        for name, values_P in figures.items()
        if (votes or not name.startswith("majority@")) and not np.isnan(values_P[chosen_P]).any()
    ]
    values_KP = np.stack([figures[name][chosen_P] for name in names])
    low_K, high_K = bootstrap_intervals(values_KP, np.random.default_rng(seed))
    metrics = {}
    for name, mean, low, high in zip(names, values_KP.mean(1), low_K, high_K, strict=True):
        metrics[f"{prefix}/{name}"] = float(mean)
        metrics[f"{prefix}/{name}/low"] = float(low)
        metrics[f"{prefix}/{name}/high"] = float(high)
    return metrics


def _right(sample: Sample) -> float:
    """Return the reward component that says whether the response is correct; NaN if there is none."""
    components = sample.outcome.components if isinstance(sample.outcome, Score) else {}
    return float(next((components[name] for name in CORRECT if name in components), math.nan))


def _passes(sample: Sample, threshold: float) -> bool:
    right, score = _right(sample), sample.score
    return score is not None and (score if math.isnan(right) else right) >= threshold


def _extras(sample: Sample) -> Mapping[str, Any]:
    return sample.outcome.extras if isinstance(sample.outcome, Score) else {}


def _answer(sample: Sample) -> Decimal | str | None:
    """Return the answer in a normal form, in which 4, 4.0 and " 4 " are equal."""
    answer = _extras(sample).get(ANSWER)
    text = "" if answer is None else str(answer).strip()
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text or None
    return number if number.is_finite() else text


def _numbered(answers: Sequence[Decimal | str | None]) -> list[int]:
    """Return the index of each answer among the distinct answers, equal for equal answers; −1 for no answer."""
    numbers: dict[Decimal | str, int] = {}
    return [
        _NO_ANSWER if answer is None else numbers.setdefault(answer, len(numbers))
        for answer in answers
    ]


class Accuracy:
    """Tracks one accuracy metric of a run: its value before the first step, and its latest value.

    Args:
        logger: the logger of the run, for a warning if a validation lacks the metric.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._warned = False
        self.metric: str | None = None
        self.before: float | None = None
        self.after: float | None = None

    metric: str | None
    """The name of the metric: `val/acc@n`, or `val/mean@n` if the reward does not say which responses are correct. None before the first
    validation with scores."""
    before: float | None
    """The metric's value before the first step; None if it is unknown."""
    after: float | None
    """The metric's latest value after training began; None before the first validation that follows."""

    def update(self, metrics: Mapping[str, float], n: int, step: int) -> None:
        """Record a validation's value of the metric.

        The first validation with metrics determines which metric is used. A validation without this metric leaves the value unchanged.
        After a change of `rollout.validation.n` the metric is chosen again, and earlier values are dropped.

        Args:
            metrics: the metrics of the validation, from `validation_metrics`.
            n: number of responses per prompt.
            step: number of finished steps.
        """
        metric = self.metric or main_metric(metrics, n)
        scored = f"val/mean@{n}" in metrics
        if scored and not metric.endswith(f"@{n}"):
            anew = main_metric(metrics, n)
            self._logger.warning(
                f"rollout.validation.n is now {n}, so validations no longer have {metric}: from now on the summary has {anew}, "
                "and no longer the values of earlier validations",
                step=step,
            )
            self.before = self.after = None
            metric = anew
        if metric in metrics:
            self.metric, value = metric, metrics[metric]
            first = self.before is None and step == 0
            self.before = value if first else self.before
            self.after = None if first else value
        elif scored and not self._warned:
            self._warned = True
            self._logger.warning(
                f"this validation has no {metric}: not every scored response has one of the reward components "
                f"{', '.join(CORRECT)}; the summary keeps the accuracy of an earlier validation",
                step=step,
            )

    def state(self) -> dict[str, Any]:
        """Return the accuracies under the names that they have in the run's `summary.json`."""
        return {
            "accuracy_metric": self.metric,
            "accuracy_before": self.before,
            "accuracy_after": self.after,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the values that `state` returned."""
        self.metric = state["accuracy_metric"]
        self.before, self.after = state["accuracy_before"], state["accuracy_after"]
