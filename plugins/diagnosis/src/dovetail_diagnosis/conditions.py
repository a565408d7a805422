"""The conditions that keep a run from learning: the metrics that show each condition, and the config key to change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from dovetail_diagnosis.history import WINDOW, MetricCourse, MetricHistory

STEPS = 5
"""Number of consecutive steps after which a warning begins or ends, since a single bad batch is no reason for a warning."""
REWARD, REWARD_STD = "reward/mean", "reward/std"
SIGNAL, ALIKE = "advantage/zero_signal_groups", "reward/identical_responses"
CUT, FAILED, ENTROPY = "response_length/clip_ratio", "reward/failure_share", "actor/entropy"
KL, KL_PENALTY, UPDATE_KL = "actor/kl", "reward/kl_penalty", "actor/approx_kl"
NORM, LOSS, HELD_OUT = "actor/grad_norm", "actor/loss", "val/loss"
CHOSEN, MARGIN = "actor/chosen_reward", "actor/margin"
_LOSSES = 8
"""Number of steps at the start and at the end of a run whose losses are compared."""
_RECENT = 200
"""Maximum number of recent steps that `_no_chance` gets."""
_LEARNING_RATE = "actor.optim.lr"


@dataclass(frozen=True)
class Condition:
    """A way in which training fails, and its symptoms."""

    name: str
    """One-word name for `events.jsonl`; also the heading of its section in docs/diagnosis.md."""
    figures: tuple[str, ...]
    """Metrics that show the condition, the most important first; `val` stands for the run's main score in validation. A
    warning quotes these metrics. A row of metrics without any of them does not count for this condition.
    """
    holds: Callable[[MetricHistory], bool]
    message: str
    hint: str
    key: str
    """The config key to change first."""
    rows: int = STEPS
    """Number of consecutive rows of metrics after which a warning begins or ends."""
    evidence: Callable[[MetricHistory], str] | None = None
    """Function that returns the evidence for a warning's message, from the run's history. None: the current values of `figures`."""
    shows: Callable[[MetricHistory], list[str]] | None = None
    """Function that returns the entries of `figures` that currently show the condition. None: all entries."""
    unless: tuple[str, ...] = ()
    """Names of conditions that explain this condition. While one of them is reported, this condition is not."""


def _no_signal(history: MetricHistory) -> bool:
    # 0.99, since a single group of many that differs by chance teaches hardly anything.
    alike = [value >= 0.99 for value in history.of(SIGNAL).values[-_RECENT:]]
    equal = [value == 0.0 for value in history.of(REWARD_STD).values[-_RECENT:]]
    return (SIGNAL in history.now and _no_chance(alike)) or (
        REWARD_STD in history.now and _no_chance(equal)
    )


def _no_chance(steps: list[bool]) -> bool:
    """Return whether the latest consecutive steps without signal (equal rewards or no advantage) are too many to be chance.

    In runs with small batches, single steps without signal are normal. The share of such steps before the latest ones is taken as their
    probability.

    Args:
        steps: for each step, whether it was without signal.
    """
    streak = next((n for n, step in enumerate(reversed(steps)) if not step), len(steps))
    before = steps[: len(steps) - streak]
    share = (sum(before) + 1) / (len(before) + 2) if any(before) else 0.0  # Laplace's rule
    return streak > 0 and len(steps) * share**streak < 0.01


def _lost(history: MetricHistory, reward: float) -> bool:
    """Return whether a reward is below the best mean of `WINDOW` consecutive rewards by more than half of that mean."""
    best = history.of(REWARD).high
    return math.isfinite(best) and best - reward > 0.5 * abs(best)


def _reward_fell(history: MetricHistory) -> bool:
    course, reward = history.of(REWARD), history.now.get(REWARD, math.nan)
    if _no_signal(history) and _lost(history, reward):
        return True
    if not (_lost(history, course.recent) and course.recent < course.first):
        return False
    return course.high - course.recent > 4 * _move(course)


def _move(course: MetricCourse) -> float:
    """Return the mean absolute change of a reward from step to step in the first 200 steps, as a measure of its noise.

    By chance, means over `WINDOW` steps differ by at most twice this value.
    """
    return fmean(abs(b - a) for a, b in pairwise(course.values[:200]))


def _collapsed(history: MetricHistory) -> bool:
    if not history.validations or history.score not in history.now:
        return False
    best, last = history.best, history.validations[-1]
    # 95% intervals that do not overlap, and a loss of a quarter: more than chance or the end of a schedule explains.
    return (
        best is not None
        and last.high < best.low
        and best.value - last.value >= 0.25 * abs(best.value)
    )


def _gamed(history: MetricHistory) -> bool:
    if not _collapsed(history) or history.best is None:
        return False
    reward = history.of(REWARD)
    before = reward.up_to(history.best.step)[-WINDOW:]
    usual = fmean(before) if len(before) == WINDOW else reward.first
    return reward.recent - usual > 2 * _move(reward)


def _rise_and_fall(history: MetricHistory) -> str:
    reward, best = history.of(REWARD), history.best
    assert best is not None  # called only for the condition `gamed`
    return (
        f"{history.score} fell from {best.value:.3g} at step {best.step} to {history.validations[-1].value:.3g}, while {REWARD} rose "
        f"to {reward.recent:.3g} (first steps: {reward.first:.3g})"
    )


def _far(history: MetricHistory) -> list[str]:
    """Return the names of the KL metrics whose current values exceed their limits."""
    limits = {UPDATE_KL: 0.5, KL: 2.0, KL_PENALTY: 2.0}
    return [name for name, limit in limits.items() if abs(history.now.get(name, 0.0)) > limit]


def _before_the_fall(history: MetricHistory) -> str:
    """Return the evidence for a fall of the score or the reward, as text: the best and the latest value, and the probable cause.

    If the gradient norm or the KL rose after the best step, the updates were too large.
    """
    best = history.best
    course = history.of(REWARD)
    since = course.high_step if best is None else best.step
    if best is not None and len(history.validations) > 1:
        last = history.validations[-1]
        fell = f"{history.score} fell from {best.value:.3g} at step {best.step} to {last.value:.3g}"
        if last.value < history.validations[0].value:
            fell += f", below its start ({history.validations[0].value:.3g})"
    else:
        fell = f"{REWARD} fell from {course.high:.3g} near step {since} to {course.recent:.3g}"
    rose = [
        f"{name} rose to {r:.3g} times"
        for name in (NORM, UPDATE_KL)
        if (r := history.rise(name, since)) >= 3
    ]
    later = (history.of(name).after(since) for name in (KL, KL_PENALTY))
    far = max((abs(max(values, key=abs)) for values in later if values), default=0.0)
    rose += [f"the KL to the reference reached {far:.3g}"] if far > 0.5 else []
    if rose:
        return f"{fell}; since then {' and '.join(rose)}: updates were too large"
    return f"{fell}; neither gradient norm nor KL rose before it"


def _overfits(history: MetricHistory) -> bool:
    held_out, trained = history.of(HELD_OUT).values, history.of(LOSS)
    if len(held_out) < 2 or HELD_OUT not in history.now:
        return False
    best = min(held_out)
    at = history.of(HELD_OUT).steps[held_out.index(best)]
    before = trained.up_to(at)
    lower = bool(before) and trained.recent < before[-1]
    return lower and held_out[-1] > best + max(0.05 * abs(best), 0.01)


def _overfitting(history: MetricHistory) -> str:
    course = history.of(HELD_OUT)
    best = min(course.values)
    at = course.steps[course.values.index(best)]
    return (
        f"{HELD_OUT} was lowest at step {at}, {best:.3g}, and is {course.values[-1]:.3g}, while {LOSS} fell "
        f"to {history.of(LOSS).recent:.3g}"
    )


def _diverges(history: MetricHistory) -> bool:
    # Runs with rewards are left out, since the size of a policy loss depends on advantages.
    losses = history.of(LOSS).values
    if REWARD in history.start or len(losses) < 2 * _LOSSES:
        return False
    # Batches differ, so the median of the last losses must exceed all of the first. Held-out rows are the same at every step.
    highest, held_out = max(losses[:_LOSSES]), history.of(HELD_OUT).values
    worse = bool(held_out) and _above(held_out[-1], held_out[0])
    return _above(median(losses[-_LOSSES:]), losses[0] if worse else highest)


def _above(loss: float, other: float) -> bool:
    return loss > other + max(0.2 * abs(other), 0.05)


def _divergence(history: MetricHistory) -> str:
    named = [(name, history.of(name).values) for name in (LOSS, HELD_OUT)]
    return ", ".join(f"{name} rose from {v[0]:.3g} to {v[-1]:.3g}" for name, v in named if v)


def _chosen_falls(history: MetricHistory) -> bool:
    chosen, margin = history.of(CHOSEN).recent, history.of(MARGIN).recent
    # Both rewards may fall a little. This condition holds if the chosen response's fall exceeds half of the margin.
    return chosen < -0.1 and -chosen > 0.5 * margin


# The limits are far outside of the values that presets show in 30 steps of the demo's task; these are in brackets.
CONDITIONS = (
    Condition(
        "gamed",
        ("val",),
        _gamed,
        "the validation score falls while the reward rises: the reward measures something other than the task",
        "read the suspect samples in the report, and correct the reward (`dovetail reward try`); a larger coefficient of algorithm.kl delays "
        "the fall. If the samples are right, the model has learned the prompts by heart: use more prompts",
        key="reward.function",
        rows=1,
        evidence=_rise_and_fall,
    ),
    Condition(
        "collapsed",
        ("val",),
        _collapsed,
        "the validation score has fallen from its best value",
        "start again from the best checkpoint (`dovetail checkpoint list`) with a third of actor.optim.lr; if neither gradient norm nor KL "
        "rose, read samples/ to see which responses the reward favours instead",
        key=_LEARNING_RATE,
        rows=1,
        evidence=_before_the_fall,
        unless=("gamed", "reward_fell"),
    ),
    Condition(
        "reward_fell",
        (REWARD, SIGNAL),
        _reward_fell,
        "the reward has fallen from its best value",
        "resume from a checkpoint before the fall with a third of actor.optim.lr, or a smaller actor.grad_clip; if neither gradient norm nor KL "
        "rose, read samples/ to see how the responses changed",
        key=_LEARNING_RATE,
        evidence=_before_the_fall,
        unless=("collapsed",),
    ),
    # Equal rewards have no advantage. [≤ 0.66]
    Condition(
        "no_signal",
        (SIGNAL, REWARD_STD, REWARD),
        lambda history: (
            _no_signal(history) and not _lost(history, history.now.get(REWARD, math.inf))
        ),
        "all answers to a prompt have the same reward, so nothing can be learned from them",
        "read samples/ in the run directory. If right answers get no reward, correct the reward (`dovetail reward try`). If all "
        "are wrong, take easier prompts, a stronger model or a larger rollout.n. If all are solved, take harder prompts",
        key="data.train_files",
        unless=("collapsed", "reward_fell"),
    ),
    # With a sharp policy, answers repeat in healthy runs as well [≤ 0.84 of 0.875], so the signal must be missing too.
    # With two answers to a prompt, the value is 0.5 if they are always equal.
    Condition(
        "alike",
        (ALIKE,),
        lambda history: history.now.get(ALIKE, 0.0) >= 0.5 and _no_signal(history),
        "most answers are equal to another answer to the same prompt",
        "raise rollout.temperature to about 1, and leave rollout.top_p and rollout.top_k out. If the policy has become this sharp "
        "during the run, resume from an earlier checkpoint with a lower actor.optim.lr or algorithm.entropy.coef=0.001",
        key="rollout.temperature",
        unless=("collapsed", "reward_fell"),
    ),
    # An answer that is cut off rarely has a result. With long reasoning, a third may be cut off at first. [≤ 0.012]
    Condition(
        "cut",
        (CUT, "response_length/limit"),
        lambda history: history.now.get(CUT, 0.0) > 0.5,
        "most responses are cut off at the length limit",
        "raise data.max_response_length. If responses continue after their answer, the rollout does not stop at the token that "
        "ends a turn: see rollout.stop_token_ids, and `dovetail check`",
        key="data.max_response_length",
        unless=("gamed", "collapsed", "reward_fell", "kl"),
    ),
    # A judge that is busy at times fails less often; above reward.max_failure_share the run stops. [0]
    Condition(
        "failures",
        (FAILED,),
        lambda history: history.now.get(FAILED, 0.0) > 0.05,
        "reward computations fail, and the run discards their samples",
        "samples/ in the run directory has every failure's message; raise reward.timeout or reward.retries if a service is slow",
        key="reward.timeout",
    ),
    # Nats a token. Early stopping usually has a limit of 0.01 to 0.05 within an update [≤ 0.012]. A policy at a distance of two
    # nats from its reference no longer writes the language that it was trained on [≤ 0.12].
    Condition(
        "kl",
        (UPDATE_KL, KL, KL_PENALTY),
        lambda history: bool(_far(history)),
        "the policy has moved too far, by its KL divergence in nats a token",
        "resume from an earlier checkpoint with a lower actor.optim.lr or actor.grad_clip, fewer actor.epochs, or a larger "
        "coefficient of algorithm.kl",
        key=_LEARNING_RATE,
        shows=_far,
    ),
    # Nats a token; below 0.001, sampling is practically greedy. [≥ 0.026]
    Condition(
        "entropy_collapsed",
        (ENTROPY,),
        lambda history: history.now.get(ENTROPY, 1.0) < 0.001,
        "the policy's entropy has collapsed: it no longer explores",
        "raise rollout.temperature, or resume from an earlier checkpoint with a lower actor.optim.lr, "
        "algorithm.entropy.coef=0.001 or a larger algorithm.policy_loss.clip_high",
        key="rollout.temperature",
    ),
    # Relative to the run's start, since a base model may begin high. Text has about 1 nat a token; 2.5 nats look like noise.
    # [rises by ≤ 0.014]
    Condition(
        "entropy_exploded",
        (ENTROPY,),
        lambda history: history.now.get(ENTROPY, 0.0) > history.start.get(ENTROPY, math.inf) + 1.5,
        "the policy's entropy has risen by more than 1.5 nats a token since the run began: its text becomes noise",
        "resume from an earlier checkpoint with a lower actor.optim.lr or algorithm.entropy.coef",
        key="algorithm.entropy.coef",
    ),
    Condition(
        "overfits",
        (HELD_OUT,),
        _overfits,
        "the loss on held-out rows rises while the training loss falls: the model learns the rows by heart",
        "train for fewer epochs (trainer.total_epochs) or on more rows; trainer.best_metric=val/loss with trainer.export=best keeps the "
        "best model",
        key="trainer.total_epochs",
        rows=2,
        evidence=_overfitting,
    ),
    Condition(
        "diverges",
        (LOSS, NORM),
        _diverges,
        "the loss has risen above what it was at the start",
        "start again with a third of actor.optim.lr, and with actor.optim.warmup_steps; a smaller actor.grad_clip limits the effect of single rows",
        key=_LEARNING_RATE,
        evidence=_divergence,
    ),
    Condition(
        "chosen_falls",
        (CHOSEN, MARGIN),
        _chosen_falls,
        "the chosen responses have become less likely than under the reference, by more than half of the margin",
        "set actor.objective.nll_coef=0.2, which keeps chosen responses likely, or lower actor.optim.lr",
        key="actor.objective",
    ),
)
FOLLOWED = frozenset(
    {REWARD, REWARD_STD, SIGNAL, NORM, UPDATE_KL, KL, KL_PENALTY, LOSS, HELD_OUT, CHOSEN, MARGIN}
)
"""Metrics whose earlier values the conditions use."""
