"""Evaluator: validation on held-out prompts, the run's accuracy, and the best checkpoint."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from dovetail.checkpoint.best import Best
from dovetail.checkpoint.store import CheckpointStore
from dovetail.experience.group import Group
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.experience.rollout_service import RolloutService
from dovetail.experience.validation import validation_metrics
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.reward import Failure, Sample
from dovetail.run.accuracy import AccuracyKeeper
from dovetail.run.collector import shown
from dovetail.run.publisher import WeightPublisher
from dovetail.run.record import RunRecord
from dovetail.sections import RunConfig
from dovetail.stages.sampling import validation_sampling


class Evaluator:
    """Scores held-out prompts.

    Args:
        record: of the run.
        publisher: sends the weights to replicas before they generate.
        service: generates and scores.
        pool: the replicas, for their metrics.
        prompts: held out; none means that nothing is validated.
        store: of checkpoints, which remembers the best one.
    """

    def __init__(
        self,
        record: RunRecord,
        publisher: WeightPublisher,
        service: RolloutService,
        *,
        pool: RolloutPool,
        prompts: Sequence[Prompt],
        store: CheckpointStore,
    ) -> None:
        self._record, self._publisher, self._service = record, publisher, service
        self._pool, self._prompts = pool, prompts
        self._best = Best.of(record.config.trainer, store, record.logger)
        self._accuracy = AccuracyKeeper(record.logger)

    def validate(self) -> dict[str, float]:
        """Score the held-out prompts and return the metrics; nothing where there are none."""
        record, config = self._record, self._record.config
        if not self._prompts:
            return {}
        how = config.rollout.validation
        began = time.monotonic()
        self._publisher.ready()
        with self._service.uncounted(), record.phase("validation"):
            samples = held_out_samples(
                config, self._prompts, self._service, self._publisher.generated
            )
        metrics = validation_metrics(
            samples, how.n, seed=config.seed, pass_threshold=how.pass_threshold
        )
        if (problem := unscored(samples)) is not None:
            record.logger.warning(problem, step=record.state.step)
        metrics["time/validation"] = time.monotonic() - began
        self._pool.metrics()  # what validation did is not the next step's
        record.state = self._accuracy.updated(record.state, metrics, how.n)
        rows = [s.row() for s in shown(samples, config.trainer.validation_samples)]
        record.directory.write_samples(record.state.step, rows, name="validation")
        record.hooks.metrics_logged(step=record.state.step, metrics=metrics)
        record.save_best(self._best, metrics)
        record.stop.check()
        return metrics


def held_out_samples(
    config: RunConfig,
    prompts: Sequence[Prompt],
    service: RolloutService,
    generated: Callable[[], None] | None = None,
) -> list[Sample]:
    """Generate and score `rollout.validation.n` samples to each prompt, `data.val_batch_size` prompts at once.

    Args:
        config: of the run.
        prompts: held out.
        service: generates and scores.
        generated: called after each batch of prompts.
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
    """Return the warning about a validation of which some responses have no score; None where all have one."""
    failures = [s.outcome for s in samples if isinstance(s.outcome, Failure)]
    if not failures:
        return None
    responses = len(samples)
    counts = Counter(failure.kind.value for failure in failures)
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    why = f"({kinds}); the first: {failures[0].message}"
    if len(failures) == responses:
        return f"validation has no metrics: none of its {responses} responses could be scored {why}"
    return f"a validation leaves out {len(failures)} of its {responses} responses, which could not be scored {why}"
