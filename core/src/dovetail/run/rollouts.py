"""RolloutService: generates and scores the samples of a step, with refills, and those of a validation."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.experience.failure_refill import refill, thinned
from dovetail.experience.faults import check_failures, too_many_failures
from dovetail.experience.generation import Generated, Sample, generate_and_score
from dovetail.experience.refill import Rollout, Rounds
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.experience.sample_checks import check_completions, check_outcomes
from dovetail.experience.sample_columns import rollout_metrics
from dovetail.interfaces.reward import Failure, RewardManager
from dovetail.interfaces.rollout import SamplingParams
from dovetail.interfaces.stage import StepContext
from dovetail.metrics import values
from dovetail.run.publisher import WeightPublisher
from dovetail.run.record import RunRecord
from dovetail.scoring.scorer import Scorer
from dovetail.stages.sampling import training_sampling

if TYPE_CHECKING:
    from dovetail.data.ledger import Ledger
    from dovetail.data.loader import Issued, PromptLoader
    from dovetail.interfaces.sample_filter import SampleFilter

FAILURES_SHOWN = 64
"""Samples without a score that are written besides those that the config asks for."""


class RolloutService:
    """Draws samples to prompts from the replicas and scores each as it arrives.

    Args:
        record: of the run.
        publisher: sends the weights to replicas before they generate.
        pool: the replicas.
        manager: scores.
        tokenizer: of the run.
        loader: gives the prompts.
        ledger: accounts for each.
        filters: sample filters by name, in the order in which they are applied.
    """

    def __init__(
        self,
        record: RunRecord,
        publisher: WeightPublisher,
        *,
        pool: RolloutPool,
        manager: RewardManager,
        tokenizer: Any,
        loader: PromptLoader,
        ledger: Ledger,
        filters: Mapping[str, SampleFilter],
    ) -> None:
        self._record, self._publisher = record, publisher
        self._pool, self._manager, self._tokenizer = pool, manager, tokenizer
        self._loader, self._ledger, self._filters = loader, ledger, filters

    def collect(self, step: StepContext, asked: Collection[str]) -> Rollout:
        """Generate and score the step's samples, streaming, in rounds: groups of which nothing is left are replaced.

        Args:
            step: the step that is under way.
            asked: columns with log-probabilities that the engine must give.

        Raises:
            RewardError: more than `reward.max_failure_share` of the samples could not be scored.
            PluginBrokenError: in the first step: a completion or an outcome is not as its interface says.
        """
        record, config, baseline = self._record, self._record.config, self._record.plan.baseline
        issued: Sequence[Issued] = self._loader.next_batch()
        sampling = training_sampling(config, asked)
        limit, share = config.algorithm.max_generation_rounds, config.reward.max_failure_share
        rounds = Rounds(
            len(issued),
            self._filters,
            temperature=config.rollout.temperature,
            baseline=baseline,
        )
        self._publisher.ready()
        while True:
            with record.phase("rollout"):
                generated = self._generate_step(
                    issued,
                    config.rollout.n,
                    step=step,
                    sampling=sampling,
                    first_group=rounds.prompts,
                    baseline=baseline,
                )
                generated, issued = self._refilled(generated, issued, sampling, step)
                rounds.add(generated)
                for item in issued:
                    self._ledger.finish(item.epoch, item.prompt.index, item.attempt)
            enough = not rounds.missing or rounds.count == limit
            if enough or any(too_many_failures(s, share) for s in (rounds.samples, rounds.greedy)):
                break
            record.stop.check()
            issued = self._loader.next_batch(rounds.missing)
        metrics = values(self._pool.figures())
        self._publisher.rest()
        step.metrics |= metrics
        rollout = rounds.rollout(refills=limit > 1)
        self._report(rollout, step)
        directory = record.directory.path
        check_failures(rollout.samples, share, step.number, directory)
        check_failures(rollout.greedy, share, step.number, directory, "greedy baselines")
        record.observers.emit("reward_finished", step=step.number, metrics=dict(step.metrics))
        record.stop.check()
        if step.first:
            longest = config.data.max_response_length
            check_completions(rollout.samples, config.rollout, longest)
        return rollout

    def generate(
        self,
        issued: Sequence[Issued],
        n: int | Sequence[int],
        sampling: SamplingParams,
        purpose: str,
        **asked: Any,
    ) -> tuple[Generated, Scorer]:
        """Draw n samples a prompt, and score them; for the arguments see `generate_and_score`."""
        reward = self._record.config.reward
        scorer = Scorer(
            self._manager,
            timeout=reward.timeout,
            retries=reward.retries,
            concurrency=reward.concurrency,
        )
        generated = asyncio.run(
            generate_and_score(
                issued,
                n=n,
                sampling=sampling,
                pool=self._pool,
                scorer=scorer,
                tokenizer=self._tokenizer,
                seed=self._record.config.seed,
                purpose=purpose,
                **asked,
            )
        )
        self._publisher.generated()
        return generated, scorer

    def _generate_step(
        self,
        issued: Sequence[Issued],
        n: int | Sequence[int],
        *,
        step: StepContext,
        sampling: SamplingParams,
        **asked: Any,
    ) -> Generated:
        generated, scorer = self.generate(issued, n, sampling, "train", **asked)
        for name, seconds in (("scoring", scorer.seconds), ("scoring_left", scorer.left)):
            key = f"time/rollout/{name}"
            step.metrics[key] = step.metrics.get(key, 0.0) + seconds
        if step.first:
            check_outcomes(generated.samples, self._record.config.reward.manager)
        return generated

    def _refilled(
        self,
        generated: Generated,
        issued: Sequence[Issued],
        sampling: SamplingParams,
        step: StepContext,
    ) -> tuple[Generated, Sequence[Issued]]:
        """The round with other samples in place of those that could not be scored, where the config wants them replaced."""
        reward, n = self._record.config.reward, self._record.config.rollout.n
        if reward.on_failure != "refill":
            return generated, issued
        redrawn = 0
        for _ in range(reward.refill_rounds):
            both = (generated.samples, generated.baselines)
            stop = any(too_many_failures(part, reward.max_failure_share) for part in both)
            if stop or not thinned(generated, n):
                break
            self._record.stop.check()
            refilled = refill(
                generated,
                issued,
                n=n,
                whole=self._manager.unit == "group",
                ledger=self._ledger,
                generate=partial(self._generate_step, step=step, sampling=sampling),
            )
            generated, issued = refilled.generated, refilled.issued
            redrawn += refilled.samples
        step.metrics["reward/refilled"] = step.metrics.get("reward/refilled", 0.0) + redrawn
        return generated, issued

    def _report(self, rollout: Rollout, step: StepContext) -> None:
        """Metrics, written samples and hooks of a rollout that is finished."""
        record, config = self._record, self._record.config
        samples = rollout.samples
        step.metrics |= rollout_metrics(samples, config.data.max_response_length, rollout.greedy)
        step.metrics |= rollout.metrics
        generated = sum(len(s.completion.response_ids) for s in (*samples, *rollout.greedy))
        step.tokens = generated + sum(len(s.issued.prompt.prompt_ids) for s in samples)
        seconds = max(record.timers.seconds("rollout"), 1e-9)
        step.metrics["perf/rollout_tokens_per_second"] = generated / seconds
        rows = rollout.rows(shown(samples, config.trainer.samples_per_step))
        record.directory.write_samples(step.number, rows)
        record.trackers.samples(step.number, rows)
        record.observers.emit("rollout_finished", step=step.number, samples=samples)


def shown(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Return the first samples, as many as the limit says (−1: all), and the first that failed."""
    if limit < 0:
        return list(samples)
    failures = [s for s in samples[limit:] if isinstance(s.outcome, Failure)]
    return [*samples[:limit], *failures[:FAILURES_SHOWN]]
