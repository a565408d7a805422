"""The times that a run measured for the parts of its steps, and a forecast of the step time under another plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs
import numpy as np

from dovetail.config import load_config, to_mapping
from dovetail.errors import PlanError
from dovetail.planning import Plan, make_plan
from dovetail.sections import RunConfig
from dovetail.telemetry import RunDirectory, read_rows, step_of
from dovetail_rollouts.placement import ROLLOUT
from dovetail_rollouts.schedule_simulation import (
    Costs,
    Decoding,
    Prediction,
    RunSchedule,
    generation_seconds,
    simulate,
)

_WARM_UP = 2
"""Number of first steps to leave out, in which engines compile and caches fill."""
_STEPS = 20
"""Minimum number of steps to simulate."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of the generation time due to `Decoding.fixed` (the rest is due to `each`) to simulate; other shares are interpolated."""
_ROUNDS = 6
"""Maximum number of simulations to match the measured seconds of generation."""
_FIT_ERROR = 1e-3
"""Relative error of the seconds of generation that counts as a match."""
_MODEL_ERROR = 0.05
"""Tolerated relative error of the number of concurrent samples, since an engine is less simple than the simulation."""
_WAITS = ("time/rollout", "time/drain")
"""Metrics of the times in which the trainer waits for the rollout."""
_NEEDED = (
    "time/rollout",
    "time/rollout/generation",
    "time/rollout/scoring_left",
    "rollout/idle_seconds",
    "perf/rollout_concurrency",
    "prompt_length/mean",
    "response_length/mean",
    "response_length/max",
)
_PREDICTED = (
    "data.train_batch_size.",
    "rollout.n.",
    "rollout.replicas.",
    "rollout.partial_rollout.",
    "rollout.validation.",
    "rollout.weight_check.",
    "rollout.max_restarts.",
    "actor.optim.",
)
"""Beginnings of config keys that `differences` does not report: the prediction takes them into account, or they change neither response
lengths nor times."""


@attrs.frozen(kw_only=True)
class Measured:
    """The measurements of a run's steps, without its first steps.

    Attributes:
        name: the path of the run's directory, as text.
        plan: the plan of the run.
        steps: the metrics of each step.
        lengths: the lengths of the responses in tokens, step by step.
    """

    name: str
    plan: Plan
    steps: Sequence[Mapping[str, float]]
    lengths: Sequence[int]

    def mean(self) -> Prediction:
        """Return the measured means of the quantities that the simulation predicts."""
        seconds = fmean(step["time/step"] for step in self.steps)

        def share(*names: str) -> float:
            return fmean(sum(step.get(name, 0.0) for name in names) for step in self.steps)

        return Prediction(
            step_seconds=seconds,
            trainer_waits=share(*_WAITS) / seconds,
            rollout_idle=share("rollout/idle_seconds") / seconds,
            generation_seconds=share("time/rollout/generation"),
            sample_seconds=fmean(
                step["perf/rollout_concurrency"] * step["time/rollout/generation"]
                for step in self.steps
            ),
        )

    def costs(self) -> Costs:
        """Return the median times of the parts of a step."""

        def middle(seconds: Iterator[float]) -> float:
            return max(median(seconds), 0.0)

        ranks, samples = schedule_of(self.plan).ranks, self.plan.counts.samples_per_step
        prompt = fmean(step["prompt_length/mean"] for step in self.steps)
        others = (*_WAITS, "time/weight_sync")
        published = [s["time/weight_sync"] for s in self.steps if "time/weight_sync" in s]
        return Costs(
            scoring=middle(s["time/rollout/scoring_left"] for s in self.steps),
            collection=middle(
                s["time/rollout"] - s["time/rollout/generation"] - s["time/rollout/scoring_left"]
                for s in self.steps
            ),
            learning=middle(
                (s["time/step"] - sum(s.get(name, 0.0) for name in others))
                * ranks
                / (samples * (prompt + s["response_length/mean"]))
                for s in self.steps
            ),
            publication=median(published) if published else 0.0,
            prompt_tokens=prompt,
        )

    def decodings(self) -> list[Decoding]:
        """Return three decoding times with which a simulation reproduces the run's generation time and concurrency.

        The first is the best fit. The other two bound the seconds of a decoding step that don't depend on the number of samples
        (`Decoding.fixed`): the smallest and the largest with which the simulated concurrency is within 5% of the run's.
        """
        schedule, costs, measured = schedule_of(self.plan), self.costs(), self.mean()
        count = self.plan.counts.samples_per_step
        own = [self.lengths[i : i + count] for i in range(0, len(self.lengths), count)]
        alone = [
            fmean(generation_seconds(schedule, Decoding(fixed=f, each=1 - f), part) for part in own)
            for f in (1, 0)
        ]

        def fitting(share: float) -> tuple[Decoding, float]:
            scale = measured.generation_seconds
            for _ in range(_ROUNDS):
                fixed, each = (
                    scale * part / unit
                    for part, unit in zip((share, 1 - share), alone, strict=True)
                )
                decoding = Decoding(fixed=fixed, each=each)
                found = simulate(schedule, decoding, costs, self.lengths, len(self.steps))
                scale *= measured.generation_seconds / found.generation_seconds
                if math.isclose(
                    found.generation_seconds, measured.generation_seconds, rel_tol=_FIT_ERROR
                ):
                    break
            return decoding, found.sample_seconds

        seconds = [fitting(share)[1] for share in _SHARES]
        shares = np.linspace(0, 1, 1001)
        apart = np.interp(shares, _SHARES, seconds) / measured.sample_seconds - 1
        close = shares[np.abs(apart) <= _MODEL_ERROR]
        alike = max(seconds) - min(seconds) <= 2 * _FIT_ERROR * max(seconds)
        if alike or not len(close):
            # The concurrency is the same for every share, or close to the run's for none, so any share is possible.
            found = [0.5, 0.0, 1.0]
        else:
            order = np.argsort(seconds)
            usual = np.interp(
                measured.sample_seconds, np.take(seconds, order), np.take(_SHARES, order)
            )
            found = [usual, min(close.min(), usual), max(close.max(), usual)]
        return [fitting(float(share))[0] for share in found]


@attrs.frozen(kw_only=True)
class Forecast:
    """The prediction of times for a given plan, from the measurements of a run.

    Attributes:
        measured: means of the run's own steps.
        own: the prediction for the plan of the measured run, to compare with `measured`.
        predicted: the prediction for the given plan.
        low, high: the least and the most seconds per step of the given plan. Several divisions of a decode step's time into a fixed
            part and a part per sample fit the run (`Measured.decodings`); the plan is predicted for each.
        steps: the number of measured steps.
        assumed: the assumptions of the prediction, each as a sentence.
        differing: config keys in which run and plan differ with unknown effect, each with both values.
    """

    measured: Prediction
    own: Prediction
    predicted: Prediction
    low: float
    high: float
    steps: int
    assumed: Sequence[str]
    differing: Sequence[str]


def read_run(path: Path) -> Measured:
    """Read the measurements of a finished or running run.

    Raises:
        RunDirectoryError: there is no run at `path`.
        PlanError: the run has no finished step, lacks a metric or the response lengths, or generated nothing.
    """
    run = RunDirectory.open(path)
    config = load_config(run.config).config
    plan = make_plan(config)
    trainer = plan.facts.plugins["trainer"].title
    if not plan.generates:
        raise PlanError(
            f"run {str(path)!r} can't be measured: it generates nothing, since {trainer} trains on {plan.counts.of.name} of a dataset",
            hint="give a run whose trainer generates samples, such as on_policy",
        )
    merged: dict[int, dict[str, Any]] = {}
    for row in read_rows(run.metrics):
        if math.isfinite(step := step_of(row)):
            merged.setdefault(int(step), {}).update(row)
    rows = {number: row for number, row in merged.items() if "time/step" in row}
    if not rows:
        raise PlanError(
            f"run {str(path)!r} has no finished step",
            hint="give a run with at least 5 finished steps",
        )
    numbers = sorted(rows)[min(_WARM_UP, len(rows) - 1) :]
    if len(numbers) > (behind := plan.facts.age):
        numbers = numbers[: len(numbers) - behind]
    for name in _NEEDED:
        if missing := [number for number in numbers if rows[number].get(name) is None]:
            raise PlanError(
                f"run {str(path)!r} lacks the metric {name} of step {missing[0]}",
                hint="give a run of this Dovetail version in which every step has samples",
            )
    if not any(rows[number]["time/rollout/generation"] > 0 for number in numbers):
        raise PlanError(
            f"run {str(path)!r} generated nothing from step {numbers[0]} to step {numbers[-1]}: these steps took samples generated earlier",
            hint="give a run with more steps, or one with trainer=on_policy",
        )
    limit = config.trainer.samples_per_step
    written = {
        number: [
            max(int(row["response_length"]), 1)
            for row in read_rows(run.path / "samples" / f"step_{number}.jsonl")
        ][: None if limit < 0 else limit]
        for number in numbers
    }
    pool = [length for lengths in written.values() for length in lengths]
    if not pool:
        raise PlanError(
            f"run {str(path)!r} has written no samples, so the lengths of its responses are unknown",
            hint="give a run with trainer.samples_per_step above 0; -1, which writes all samples, is best",
        )
    count = plan.counts.samples_per_step
    lengths = [
        length
        for number in numbers
        for length in _lengths(rows[number], written[number], pool, count, number)
    ]
    steps = [rows[number] for number in numbers]
    return Measured(name=str(path), plan=plan, steps=steps, lengths=lengths)


def _lengths(
    row: Mapping[str, float], written: Sequence[int], pool: Sequence[int], count: int, seed: int
) -> list[int]:
    """Return the lengths of all responses of a step, in tokens.

    If the sample file has only some of the step's responses, the lengths are drawn from those of the whole run, and scaled to about the
    step's mean and maximum.

    Args:
        row: the metrics of the step.
        written: the lengths in the step's sample file.
        pool: the lengths in all sample files of the run.
        count: the number of the step's responses.
        seed: the seed of the draws.
    """
    if len(written) == count:
        return list(written)
    chance = np.random.default_rng(seed)
    longest = row["response_length/max"]
    drawn = chance.choice(pool, count - 1).astype(float)
    if count > 1:
        drawn *= (row["response_length/mean"] * count - longest) / drawn.sum()
    drawn = np.append(np.clip(drawn, 1, longest), longest)
    return [int(length) for length in chance.permutation(drawn.round())]


def schedule_of(plan: Plan) -> RunSchedule:
    """Return the schedule of a plan: when trainer and rollout work."""
    config, trainer, placement = plan.facts.config, plan.facts.plugins["trainer"], plan.placement
    together = ROLLOUT in placement.pool("actor").roles and not placement.source.joined
    return RunSchedule(
        groups=plan.counts.prompts_per_step,
        samples=plan.counts.of.samples,
        steps_behind=plan.facts.age,
        over_sampling=trainer.cls.over_sampling(trainer.config),
        sync_every=trainer.cls.sync_every(trainer.config),
        cut_short=config.rollout.partial_rollout,
        take_turns=together or config.rollout.offload,
        replicas=placement.source.replicas,
        most_running=config.rollout.most_running(),
        ranks=placement.pool("actor").ranks,
    )


def forecast(measured: Measured, plan: Plan) -> Forecast:
    """Predict the steps of a plan from what a run measured.

    Raises:
        PlanError: the plan generates nothing.
    """
    if not plan.generates:
        raise PlanError(
            f"no forecast is possible: {plan.facts.plugins['trainer'].title} trains on {plan.counts.of.name} of a dataset and generates nothing",
            hint="leave --from-run out",
        )
    costs, decodings, count = measured.costs(), measured.decodings(), len(measured.steps)
    longest = plan.facts.config.data.max_response_length
    lengths = [min(length, longest) for length in measured.lengths]
    steps = -(-_STEPS // count) * count
    schedule, own = schedule_of(plan), schedule_of(measured.plan)
    predicted, *others = (simulate(schedule, d, costs, lengths, steps) for d in decodings)
    seconds = [found.step_seconds for found in (predicted, *others)]
    return Forecast(
        measured=measured.mean(),
        own=simulate(own, decodings[0], costs, measured.lengths, steps),
        predicted=predicted,
        low=min(seconds),
        high=max(seconds),
        steps=count,
        assumed=tuple(_assumed(own, schedule, measured, plan)),
        differing=tuple(differences(measured.plan.facts.config, plan.facts.config)),
    )


def _assumed(
    own: RunSchedule, schedule: RunSchedule, measured: Measured, plan: Plan
) -> Iterator[str]:
    yield (
        "a decode step of a replica that runs r samples takes a + b · r seconds; processing prompts, and the tokens of "
        "continued responses, takes no further time"
    )
    if schedule.ranks != own.ranks:
        yield f"on {schedule.ranks} ranks, the stages of a step take {own.ranks}/{schedule.ranks} of their time on {own.ranks} ranks"
    if schedule.most_running is None:
        yield "a replica runs all its samples at once: the config sets no limit"
    if schedule.take_turns and schedule.steps_behind:
        yield "nothing is generated during the stages of a step: trainer and rollout share accelerators"
    transports = [p.refs["rollout.weight_transport"].name for p in (measured.plan, plan)]
    if transports[0] != transports[1] or own.replicas != schedule.replicas:
        yield f"a weight update takes as long as in the run, in which {transports[0]} sends weights to {own.replicas} replica(s)"
    offloads = [_offloads(p.facts.config) for p in (measured.plan, plan)]
    if offloads[0] != offloads[1]:
        yield "offloading and reloading take as long as in the run, although its offload settings differ"
    prompts = fmean(s.get("filter/generated_prompts", own.groups) for s in measured.steps)
    if prompts > own.groups:
        yield (
            f"a step generates samples for {schedule.groups} prompts; filters emptied groups in the run, so its steps generated "
            f"samples for {prompts:.3g} prompts on average in place of {own.groups}"
        )
    if len(measured.steps) < 3:
        yield f"the measured steps are typical of the run, although their number is only {len(measured.steps)}"


def _offloads(config: RunConfig) -> tuple[bool, ...]:
    return config.rollout.offload, config.actor.offload, config.ref.offload


def differences(run: RunConfig, config: RunConfig) -> Iterator[str]:
    """Yield the config keys that differ between a run and a config and may affect lengths or times, each with both values."""
    sections = (
        "model",
        "data",
        "rollout",
        "actor",
        "critic",
        "ref",
        "roles",
        "algorithm",
        "reward",
    )
    before, after = ({name: to_mapping(c)[name] for name in sections} for c in (run, config))
    for key, old, new in _differing("", before, after):
        if not f"{key}.".startswith(_PREDICTED):
            yield f"{key} ({old!r} in the run, {new!r} here)"


def _differing(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before.keys() | after.keys():
            yield from _differing(f"{path}.{key}".lstrip("."), before.get(key), after.get(key))
    elif before != after:
        yield path, before, after
