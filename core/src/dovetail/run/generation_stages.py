"""GenerationStages: the stages that generate and score: a step's rollout with its refills, and validation."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from dovetail.checkpoint.best import Best
from dovetail.experience.failure_refill import refill, thinned
from dovetail.experience.faults import check_failures, too_many_failures
from dovetail.experience.generation import Generated, Sample, generate_and_score
from dovetail.experience.refill import Rollout, Rounds
from dovetail.experience.sample_columns import rollout_metrics
from dovetail.experience.sampling import training_sampling, validation_sampling
from dovetail.experience.validation import validation_metrics
from dovetail.interfaces.reward import Failure
from dovetail.interfaces.rollout import SamplingParams
from dovetail.metrics import values
from dovetail.run.accuracy import AccuracyKeeper
from dovetail.run.gate import due
from dovetail.run.passive_checks import PassiveChecks
from dovetail.run.weight_stages import WeightStages
from dovetail.scoring.scorer import Scorer

if TYPE_CHECKING:
    from dovetail.data.loader import Issued
    from dovetail.run.interrupt import StopSwitch
    from dovetail.run.parts import Parts
    from dovetail.run.state import RunState

FAILURES_SHOWN = 64
"""Samples without a score that are written besides those that the config asks for."""


class GenerationStages(WeightStages):
    """Rollout and validation over the parts of a run. Arguments as in `RunFrame`."""

    def __init__(self, parts: Parts, state: RunState, stop: StopSwitch | None = None) -> None:
        super().__init__(parts, state, stop)
        self._best = Best.of(parts.config.trainer, parts.store, parts.logger)
        self._accuracy = AccuracyKeeper(parts.logger)

    def rollout_and_score(self, issued: Sequence[Issued]) -> Rollout:
        """Generate and score the step's samples, streaming, in rounds: groups of which nothing is left are replaced.

        Raises:
            RewardError: more than `reward.max_failure_share` of the samples could not be scored.
        """
        parts, config, now = self._parts, self._parts.config, self._now
        asked = self._wanted_of_rollout()
        if self._gate_due():
            asked += parts.plan.gate_log_probs
        sampling = training_sampling(config, asked)
        limit, share = config.algorithm.max_generation_rounds, config.reward.max_failure_share
        rounds = Rounds(
            len(issued),
            parts.filters,
            temperature=config.rollout.temperature,
            baseline=parts.plan.has_stage("baseline"),
        )
        self._ready_to_generate()
        while True:
            with self._phase("rollout"):
                generated = self._generate(
                    issued,
                    config.rollout.n,
                    sampling,
                    "train",
                    first_group=rounds.prompts,
                    baseline=parts.plan.has_stage("baseline"),
                )
                generated, issued = self._refilled(generated, issued, sampling)
                rounds.add(generated)
                for item in issued:
                    parts.ledger.finish(item.epoch, item.prompt.index, item.attempt)
            enough = not rounds.missing or rounds.count == limit
            if enough or any(too_many_failures(s, share) for s in (rounds.samples, rounds.greedy)):
                break
            self._stop.check()
            issued = self.loader.next_batch(rounds.missing)
        figures = values(parts.pool.figures())
        self._sync.rest()
        now.metrics |= figures
        now.rollout = rollout = rounds.rollout(refills=limit > 1)
        self._report(rollout, sampling.max_new_tokens)
        directory = parts.run_directory.path
        check_failures(rollout.samples, share, now.number, directory)
        check_failures(rollout.greedy, share, now.number, directory, "greedy baselines")
        parts.observers.emit("reward_finished", step=now.number, metrics=dict(now.metrics))
        self._stop.check()
        return rollout

    def _refilled(
        self, generated: Generated, issued: Sequence[Issued], sampling: SamplingParams
    ) -> tuple[Generated, Sequence[Issued]]:
        """The round with other samples in place of those that could not be scored, where the config wants them replaced."""
        parts, config, now = self._parts, self._parts.config, self._now
        reward, n = config.reward, config.rollout.n
        if reward.on_failure != "refill":
            return generated, issued
        redrawn = 0
        for _ in range(reward.refill_rounds):
            both = (generated.samples, generated.baselines)
            stop = any(too_many_failures(part, reward.max_failure_share) for part in both)
            if stop or not thinned(generated, n):
                break
            self._stop.check()
            refilled = refill(
                generated,
                issued,
                n=n,
                whole=parts.manager.unit == "group",
                ledger=parts.ledger,
                generate=partial(self._generate, sampling=sampling, purpose="train"),
            )
            generated, issued = refilled.generated, refilled.issued
            redrawn += refilled.samples
        now.metrics["reward/refilled"] = now.metrics.get("reward/refilled", 0.0) + redrawn
        return generated, issued

    def validate(self) -> dict[str, float]:
        """Score held-out prompts; nothing where the config names none."""
        parts, config = self._parts, self._parts.config
        if not parts.val_prompts:
            return {}
        how = config.rollout.validation
        sampling = validation_sampling(config)
        size = config.data.val_batch_size or len(parts.val_prompts)
        samples: list[Sample] = []
        began = time.monotonic()
        self._ready_to_generate()
        with self._phase("validation"):
            for start in range(0, len(parts.val_prompts), size):
                chunk = parts.val_prompts[start : start + size]
                samples += self._generate(chunk, how.n, sampling, "validation").samples
        metrics = validation_metrics(
            samples, how.n, seed=config.seed, pass_threshold=how.pass_threshold
        )
        if failures := [s.outcome for s in samples if isinstance(s.outcome, Failure)]:
            parts.logger.warning(_unscored(failures, len(samples)), step=self.step)
        metrics["time/validation"] = time.monotonic() - began
        parts.pool.figures()  # what validation did is not the next step's
        self._state = self._accuracy.updated(self._state, metrics, how.n)
        rows = [s.row() for s in _shown(samples, config.trainer.validation_samples)]
        parts.run_directory.write_samples(self.step, rows, name="validation")
        parts.trackers.log(self.step, metrics)
        self._mark_best(metrics)
        self._stop.check()
        return metrics

    def _mark_best(self, metrics: Mapping[str, float]) -> None:
        """Keep this step's checkpoint where the validation was the best so far by `trainer.best_metric`."""
        if self._best is None:
            return
        value = self._best.improved(metrics)
        if value is not None:
            self.save()
            self._best.mark(self.step, value)

    def _wanted_of_rollout(self) -> list[str]:
        """Columns that something requires of every rollout, at the price of time."""
        plan = self._parts.plan
        raw = ["raw_rollout_log_probs"] if plan.raw_rollout_log_probs else []
        return ["rollout_log_probs", *raw] if plan.rollout_log_probs else raw

    def _gate_due(self) -> bool:
        """Whether the consistency gate measures in this step, even if it has to ask for what it compares."""
        plan, section = self._parts.plan, self._parts.config.algorithm.gate
        return bool(plan.gate_log_probs) and due(self._now.number, section)

    def _generate(
        self,
        issued: Sequence[Issued],
        n: int | Sequence[int],
        sampling: SamplingParams,
        purpose: str,
        *,
        first_group: int = 0,
        groups: Sequence[int] | None = None,
        baseline: bool | Sequence[bool] = False,
    ) -> Generated:
        parts, reward = self._parts, self._parts.config.reward
        scorer = Scorer(
            parts.manager,
            timeout=reward.timeout,
            retries=reward.retries,
            concurrency=reward.concurrency,
        )
        generated = asyncio.run(
            generate_and_score(
                issued,
                n=n,
                sampling=sampling,
                pool=parts.pool,
                scorer=scorer,
                tokenizer=parts.tokenizer,
                seed=parts.config.seed,
                purpose=purpose,
                first_group=first_group,
                groups=groups,
                baseline=baseline,
            )
        )
        self._sync.generated()
        if purpose == "train":
            metrics = self._now.metrics
            for name, seconds in (("scoring", scorer.seconds), ("scoring_left", scorer.left)):
                key = f"time/rollout/{name}"
                metrics[key] = metrics.get(key, 0.0) + seconds
            self._passive.outcomes(self._now.number, generated.samples, reward.manager)
        return generated

    @cached_property
    def _passive(self) -> PassiveChecks:
        return PassiveChecks()

    def _report(self, rollout: Rollout, max_response_length: int) -> None:
        """Metrics, written samples and hooks of a rollout that is finished."""
        parts, now = self._parts, self._now
        samples = rollout.samples
        now.metrics |= rollout_metrics(samples, max_response_length, rollout.greedy)
        now.metrics |= rollout.metrics
        generated = sum(len(s.completion.response_ids) for s in (*samples, *rollout.greedy))
        now.tokens = generated + sum(len(s.issued.prompt.prompt_ids) for s in samples)
        seconds = max(parts.timers.seconds("rollout"), 1e-9)
        now.metrics["perf/rollout_tokens_per_second"] = generated / seconds
        rows = rollout.rows(_shown(samples, parts.config.trainer.samples_per_step))
        parts.run_directory.write_samples(now.number, rows)
        parts.trackers.samples(now.number, rows)
        parts.observers.emit("rollout_finished", step=now.number, samples=samples)


def _shown(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """The first samples, as many as the limit says (−1: all), and the first that failed."""
    if limit < 0:
        return list(samples)
    failures = [s for s in samples[limit:] if isinstance(s.outcome, Failure)]
    return [*samples[:limit], *failures[:FAILURES_SHOWN]]


def _unscored(failures: Sequence[Failure], responses: int) -> str:
    """What is said of a validation of which some responses have no score."""
    counts = Counter(failure.kind.value for failure in failures)
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    why = f"({kinds}); the first: {failures[0].message}"
    if len(failures) == responses:
        return f"validation has no figures: none of its {responses} responses could be scored {why}"
    return f"a validation leaves out {len(failures)} of its {responses} responses, which could not be scored {why}"
