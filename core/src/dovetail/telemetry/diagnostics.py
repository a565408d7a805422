"""Diagnostics: what in the metrics of a run shows that it can't learn, since when, and what to try."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

STEPS = 5
"""So many steps in a row begin a warning, and so many end it: one bad batch is no diagnosis."""

Metrics = Mapping[str, float]
_SIGNAL, _STD = "advantage/zero_signal_groups", "reward/std"
_ALIKE, _CUT = "reward/identical_responses", "response_length/clip_ratio"
_FAILED, _ENTROPY = "reward/failure_share", "actor/entropy"
_KL, _KL_PENALTY, _UPDATE_KL = "actor/kl", "reward/kl_penalty", "actor/approx_kl"


@dataclass(frozen=True)
class Condition:
    """What no healthy run shows for long."""

    name: str
    """One word, for `events.jsonl`."""
    metrics: tuple[str, ...]
    """What it is seen from and a warning quotes; a step without any of them says nothing."""
    holds: Callable[[Metrics, Metrics], bool]
    """Whether it holds, from a step's metrics and the first value of each metric in the run."""
    message: str
    hint: str


@dataclass
class LearningWarning:
    """A condition that held for `STEPS` steps."""

    name: str
    message: str
    """The condition, and its metrics at the step that began the warning."""
    hint: str
    """What to try."""
    first: int
    """The first step at which it held."""
    last: int | None = None
    """The last one; None as long as it is in force."""


def _no_signal(now: Metrics) -> bool:
    return now.get(_SIGNAL, 0.0) >= 0.99 or now.get(_STD, 1.0) == 0.0


# Limits lie far outside what the presets show in 30 steps of the demo's task; that is in brackets.
CONDITIONS = (
    # Equal rewards have no advantage. 0.99, since one group of many that differs by chance teaches next to nothing. [≤ 0.66]
    Condition(
        "no_signal",
        (_SIGNAL, _STD, "reward/mean"),
        lambda now, _: _no_signal(now),
        "all answers to a prompt have the same reward, so that nothing can be learned from them",
        "read samples/ in the run directory. Where the answers are right: correct the reward (`dovetail reward try`). Where all "
        "are wrong: take easier prompts, a stronger model or a larger rollout.n. Where all are solved: take harder prompts",
    ),
    # With a sharp policy answers repeat in a healthy run as well [≤ 0.84 of 0.875], so only where there is no signal either.
    # Two answers a prompt that are always the same are a half.
    Condition(
        "alike",
        (_ALIKE,),
        lambda now, _: now.get(_ALIKE, 0.0) >= 0.5 and _no_signal(now),
        "most answers repeat another one to their prompt",
        "raise rollout.temperature to about 1, and leave rollout.top_p and rollout.top_k out. Where the policy has become so sharp "
        "in this run: resume from an earlier checkpoint with a lower actor.optim.lr or algorithm.entropy.coef=0.001",
    ),
    # A cut answer rarely has its result. Long reasoning may begin with a third cut. [≤ 0.012]
    Condition(
        "cut",
        (_CUT, "response_length/limit"),
        lambda now, _: now.get(_CUT, 0.0) > 0.5,
        "most responses are cut off at the length limit",
        "raise data.max_response_length. Where responses run on after their answer, the rollout does not stop at the token that "
        "ends a turn: see rollout.stop_token_ids, and `dovetail check`",
    ),
    # A judge that is busy now and then loses fewer; above reward.max_failure_share the run stops. [0]
    Condition(
        "failures",
        (_FAILED,),
        lambda now, _: now.get(_FAILED, 0.0) > 0.05,
        "rewards fail, and the samples are lost",
        "samples/ in the run directory has every failure's message; raise reward.timeout or reward.retries where a service is slow",
    ),
    # Nats a token. Early stopping usually takes 0.01 to 0.05 within an update [≤ 0.012]; a policy two nats from its reference has
    # left the language that it was trained on [≤ 0.12].
    Condition(
        "kl",
        (_UPDATE_KL, _KL, _KL_PENALTY),
        lambda now, _: (
            now.get(_UPDATE_KL, 0.0) > 0.5
            or max(now.get(_KL, 0.0), abs(now.get(_KL_PENALTY, 0.0))) > 2.0
        ),
        "the policy moves too far, in nats a token",
        "resume from an earlier checkpoint with a lower actor.optim.lr or actor.grad_clip, fewer actor.epochs, or a larger "
        "coefficient of algorithm.kl",
    ),
    # Nats a token: at 0.001 sampling is greedy in effect. [≥ 0.026]
    Condition(
        "entropy_collapsed",
        (_ENTROPY,),
        lambda now, _: now.get(_ENTROPY, 1.0) < 0.001,
        "the policy's entropy has collapsed, so that it tries nothing new",
        "raise rollout.temperature, or resume from an earlier checkpoint with a lower actor.optim.lr, "
        "algorithm.entropy.coef=0.001 or a larger algorithm.policy_loss.clip_high",
    ),
    # Against the run's start, since a base model may begin high. Text of models has about 1 nat a token, 2.5 read as noise.
    # [rises by ≤ 0.014]
    Condition(
        "entropy_exploded",
        (_ENTROPY,),
        lambda now, start: now.get(_ENTROPY, 0.0) > start.get(_ENTROPY, math.inf) + 1.5,
        "the policy's entropy has risen by more than 1.5 nats a token since the run began: its text falls apart",
        "resume from an earlier checkpoint with a lower actor.optim.lr or algorithm.entropy.coef",
    ),
)


class Diagnostics:
    """Follows the metrics of a run from its first step.

    Attributes:
        warnings: of the whole run, in the order in which they began.
    """

    def __init__(self) -> None:
        self.warnings: list[LearningWarning] = []
        self._start: dict[str, float] = {}
        self._streaks: Counter[str] = Counter()
        """Steps in a row with a condition, or without it as a negative number."""

    @property
    def in_force(self) -> dict[str, LearningWarning]:
        """The warnings that have not ended, by the name of their condition."""
        return {warning.name: warning for warning in self.warnings if warning.last is None}

    def observe(self, step: int, metrics: Mapping[str, object]) -> list[LearningWarning]:
        """Take the metrics of the next step, and return the warnings that begin with it.

        A warning begins once its condition has held for `STEPS` steps, and ends once it has not for as many.
        """
        now = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self._start = {**now, **self._start}
        began = []
        for condition in CONDITIONS:
            if not now.keys() & set(condition.metrics):
                continue
            streak, holds = self._streaks[condition.name], condition.holds(now, self._start)
            streak = max(streak, 0) + 1 if holds else min(streak, 0) - 1
            self._streaks[condition.name] = streak
            running = self.in_force.get(condition.name)
            if streak == STEPS and running is None:
                began.append(_warning(condition, step, now))
            elif streak == -STEPS and running is not None:
                running.last = step - STEPS
        self.warnings += began
        return began


def _warning(condition: Condition, step: int, now: Metrics) -> LearningWarning:
    quoted = ", ".join(f"{name} {now[name]:.3g}" for name in condition.metrics if name in now)
    message = f"for {STEPS} steps in a row, {condition.message}: {quoted}"
    return LearningWarning(condition.name, message, condition.hint, first=step - STEPS + 1)
