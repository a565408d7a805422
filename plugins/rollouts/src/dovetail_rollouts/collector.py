"""RolloutCollector: collects the samples of a step from the rollout service, with refills and filters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dovetail.errors import StopRequested
from dovetail.interfaces import SampleFilter, Site, StepAsk, StepContext, Tokenizer
from dovetail.metrics import values
from dovetail.telemetry import plain
from dovetail.text import encodable
from dovetail_datasets import share_metrics
from dovetail_rollouts.columns import BASELINE, OF_EPISODES
from dovetail_rollouts.dynamic_sampler import DynamicSampler
from dovetail_rollouts.early_release import EarlyRelease
from dovetail_rollouts.group import Group
from dovetail_rollouts.group_state import pack, unpack
from dovetail_rollouts.rollout_pool import RolloutPool
from dovetail_rollouts.rollout_service import RolloutService
from dovetail_rollouts.sample_checks import (
    check_completions,
    check_failures,
    check_outcomes,
    too_many_failures,
)
from dovetail_rollouts.sample_files import shown, token_row
from dovetail_rollouts.sample_metrics import rollout_metrics, staleness_metrics
from dovetail_rollouts.sampling import training_sampling
from dovetail_rollouts.weight_sync import WeightSync


class RolloutCollector:
    """Submits prompts to the rollout service, and builds a step's experience from the returned groups.

    Args:
        site: the parts of the run that `ExperienceSource.open` receives, such as the plan and the loader of prompts.
        sync: the object that sends the weights to replicas before generation.
        service: the service that generates and scores.
        pool: the replicas, for their metrics.
        tokenizer: the tokenizer of the run, for the tokens of episodes in `samples/`.
        whole: whether a group's scores depend on each other, so that a retry draws the whole group again.
        filters: sample filters by name, in the order in which they are applied.
    """

    def __init__(
        self,
        site: Site,
        sync: WeightSync,
        service: RolloutService,
        *,
        pool: RolloutPool,
        tokenizer: Tokenizer,
        whole: bool,
        filters: Mapping[str, SampleFilter],
    ) -> None:
        self._site, self._sync, self._service = site, sync, service
        self._pool, self._tokenizer, self._whole = pool, tokenizer, whole
        self._loader, self._ledger, self._filters = site.loader, site.ledger, filters
        self._max_staleness = site.plan.facts.age
        trainer = site.plan.facts.plugins["trainer"]
        self._over_sampling = trainer.cls.over_sampling(trainer.config) is not None
        self._taken: dict[int, list[Group]] = {}
        self._doubted: set[Group] = set()

    def admit(self, count: int, ask: StepAsk) -> None:
        """Take the next `count` prompts, and start to generate a group for each; see `ExperienceSource.admit`."""
        config = self._site.config
        outstanding = self._service.outstanding
        sampling = training_sampling(config, ask.columns)
        baseline = BASELINE in self._site.plan.facts.required
        self._service.admit(
            [
                Group(
                    prompt=prompt,
                    n=config.rollout.n,
                    sampling=sampling,
                    baseline=baseline,
                    due=ask.due,
                    priority=ask.step + place // ask.groups,
                )
                for place, prompt in enumerate(self._loader.next_batch(count), outstanding)
            ]
        )

    def collect(self, step: StepContext, ask: StepAsk) -> DynamicSampler:
        """Wait for the step's groups, those of `admit` first, and return a sampler with their samples.

        If filters drop groups, the sampler collects further groups in their place.

        Raises:
            RewardError: more than `reward.max_failure_share` of the samples could not be scored.
            PluginBrokenError: in the first step, a completion, a score or a failure violates its interface.
        """
        site, config = self._site, self._site.config
        early = EarlyRelease(step=step.number, batch=ask.groups) if self._over_sampling else None
        limit, share = config.algorithm.max_generation_rounds, config.reward.max_failure_share
        rollout = DynamicSampler(
            ask.groups,
            self._filters,
            temperature=config.rollout.temperature,
            baseline=BASELINE in site.plan.facts.required,
            refills=limit > 1,
            columns=OF_EPISODES & site.plan.facts.required.keys(),
        )
        self._taken = {step.number: []}
        self._service.passed.clear()
        if self._max_staleness:
            step.metrics["rollout/queued"] = float(self._service.outstanding)
            step.metrics["rollout/ready"] = float(self._service.ready)
        self._sync.ready()
        while True:
            with site.phase("rollout"):
                if rollout.missing > self._service.outstanding:
                    lacking = rollout.missing - self._service.outstanding
                    self.admit(lacking, ask)
                groups = self._take(rollout.missing, early)
                self._taken[step.number] += groups
                self._refill(groups, step)
                self._sync.generated()
                if step.first:
                    check_outcomes([s for g in groups for s in g.samples], config.reward.manager)
                rollout.add(groups)
                for group in groups:
                    self._enter(group, step)
            enough = not rollout.missing or rollout.count == limit
            if enough or any(
                too_many_failures(s, share) for s in (rollout.samples, rollout.greedy)
            ):
                break
            site.check_stop()
        metrics = values(self._pool.replicas.metrics())
        if not self._service.running:
            self._sync.rest()
        step.metrics |= metrics
        self._report(rollout, step)
        directory = site.path
        check_failures(rollout.samples, share, step.number, directory)
        check_failures(rollout.greedy, share, step.number, directory, "greedy baselines")
        site.hooks.reward_finished(step=step.number, metrics=dict(step.metrics))
        site.check_stop()
        if step.first:
            longest = config.data.max_response_length
            check_completions(rollout.samples, config.rollout, longest)
        return rollout

    def state(self) -> dict[str, Any]:
        """Return the groups that no step has used, with their samples so far, and the settings of sampling and scoring.

        A group that a failed step gave back is returned without its samples. If checkpoints do not keep unfinished responses, it is left
        out altogether.
        """

        def sound(groups: Sequence[Group]) -> dict[str, Any]:
            kept = [
                group.anew() if group in self._doubted else group
                for group in groups
                if self._service.continues or group not in self._doubted
            ]
            return pack(kept)

        return {
            "drawn": self._how(),
            "step": self._site.finished(),
            "max_staleness": self._max_staleness,
            **self._service.kept(sound),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the groups of `state`.

        Groups are not restored, so that their samples are generated again, if the settings of sampling or scoring have changed, or if
        the groups would exceed a reduced `max_staleness`.
        """
        if state["drawn"] != self._how() or not state["groups"]:
            return
        config, total = self._site.config, self._site.plan.counts.steps
        sampling = partial(training_sampling, config)
        later = self._max_staleness - state["max_staleness"]
        groups, kept = unpack(state, self._loader.issued, sampling), list[Group]()
        for group in groups:
            taken_by = state["step"] + 1 + len(kept) // config.data.train_batch_size
            if group.due is not None:
                group.due = min(group.due + later, total)
            if later >= 0 or group.due is None or group.due >= taken_by:
                kept.append(group)
                self._loader.hold(group.prompt)
        if len(kept) < len(groups):
            self._site.logger.warning(
                "the checkpoint has groups that are older than the trainer now allows: their samples are generated again",
                groups=len(groups) - len(kept),
            )
        self._service.give_back(kept)

    def _how(self) -> str:
        """Return a digest of the settings that, besides the weights, determine samples and scores; `load_state` compares it."""
        config = self._site.config
        how = (
            config.rollout.n,
            config.rollout.agent_loop,
            training_sampling(config, self._site.plan.on_request),
            config.reward,
            config.data.max_prompt_length,
        )
        return hashlib.blake2b(repr(how).encode(), digest_size=8).hexdigest()

    def _take(self, count: int, early: EarlyRelease | None) -> list[Group]:
        try:
            return self._service.take(count, early)
        except StopRequested:
            self._sync.rest()  # the trainer needs the accelerator to save the run
            raise

    def give_back(self, step: int, *, sound: bool) -> None:
        """Put the groups of an unfinished step back at the front of the queue, unchanged, for the next step.

        Args:
            step: the number of the step.
            sound: True if the step was stopped, False if it failed. Checkpoints leave out the samples of a failed step's groups,
                since these samples may have caused the failure.
        """
        groups = self._taken.pop(step, [])
        self._ledger.give_back(step)
        self._service.give_back(groups)
        if not sound:
            self._doubted |= set(groups)

    def _refill(self, groups: Sequence[Group], step: StepContext) -> None:
        """Generate samples in place of those that could not be scored, if `reward.on_failure` is `refill`."""
        reward = self._site.config.reward
        if reward.on_failure != "refill":
            return
        redrawn = 0
        for _ in range(reward.refill_rounds):
            samples = [sample for group in groups for sample in group.samples]
            greedy = [group.greedy for group in groups if group.greedy is not None]
            thinned = [group for group in groups if group.missing() != (0, False)]
            share = reward.max_failure_share
            if not thinned or any(too_many_failures(part, share) for part in (samples, greedy)):
                break
            self._site.check_stop()
            for group in thinned:
                group.try_again(whole=self._whole)
                missing, baseline = group.missing()
                redrawn += missing + baseline
            self._service.generate(thinned)
        step.metrics["reward/refilled"] = step.metrics.get("reward/refilled", 0.0) + redrawn

    def _enter(self, group: Group, step: StepContext) -> None:
        """Record in the run's ledger of prompts that the step takes a group, and that earlier attempts to generate the group failed."""
        epoch, prompt, latest = group.prompt.key
        while (attempt := self._ledger.attempt(epoch, prompt)) < latest:
            self._ledger.retry(epoch, prompt, attempt)
        self._ledger.take(epoch, prompt, latest, step=step.number)

    def _report(self, rollout: DynamicSampler, step: StepContext) -> None:
        """Record the metrics of a step's collected samples, write some of the samples to the run's sample files, and call the hooks."""
        site, config, service = self._site, self._site.config, self._service
        samples = rollout.samples
        step.metrics |= service.seconds()
        step.metrics |= rollout_metrics(samples, config.data.max_response_length, rollout.greedy)
        step.metrics |= rollout.metrics
        lengths = [(s.prompt, len(s.prompt.prompt_ids) + s.response_length) for s in samples]
        step.metrics |= share_metrics(lengths, config.data.mixture)
        if self._max_staleness:
            step.metrics |= staleness_metrics(samples, site.weights.version)
            step.metrics["rollout/passed_over"] = float(len(service.passed))
        generated = sum(s.response_length for s in (*samples, *rollout.greedy))
        observed = sum(int(np.count_nonzero(~s.produced_T)) for s in samples)
        forked = sum(
            len(c.prompt_ids) for s in samples for c in s.sequences if c.prompt_ids is not None
        )
        step.tokens = generated + observed + forked + sum(len(s.prompt.prompt_ids) for s in samples)
        seconds = max(step.metrics["time/rollout/generation"], 1e-9)
        step.metrics["perf/rollout_tokens_per_second"] = generated / seconds
        chosen = shown(samples, config.trainer.samples_per_step)
        rows = rollout.rows(chosen)
        site.directory.write_samples(
            step.number,
            [
                row | token_row(sample, self._tokenizer)
                for row, sample in zip(rows, chosen, strict=True)
            ],
        )
        site.hooks.samples_logged(step=step.number, rows=encodable(plain(rows)))
        site.hooks.rollout_finished(step=step.number, samples=samples)
