"""The reward manager `hybrid`: a reward of several scorers, each with a weight, an optional gate and its own manager."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginConfig,
    PluginContext,
    RewardManager,
    RunningTime,
    Sample,
    Score,
)
from dovetail.plugins import ref_for
from dovetail.sections import PluginSection, RewardSection
from dovetail_rewards.manager_config import HybridConfig, ScorerSection
from dovetail_rewards.managers.inner import NAIVE, InnerManager, manager_class
from dovetail_rollouts import configured_functions, finite_float

GATED = "gated"
"""The component that is 1 if a gate stopped the sample, else 0."""


class HybridManager(RewardManager):
    """Runs several scorers in order and sums their weighted scores.

    A gate is a minimum score of one scorer: for a sample below it, later scorers do not run. Scorers between two gates run concurrently.
    The score of scorer `k` is the component `k` of the reward, or the scorer's option `skipped` if a gate stopped the sample; a
    component `c` that the scorer itself returns becomes `k/c`. (The advantage estimator `gdpo` normalises components.) If any scorer
    fails, the sample fails with the same failure kind. If a scorer gives each token a reward, the other scorers' weighted scores are
    added at the last token.

    Every scorer has a manager: `parallel` for a rule that needs a process, `judge` for a language model, … Each manager has its own
    capacity limit; waiting for free capacity does not count as running time.
    """

    name = "hybrid"
    api = ">=1.0,<2"
    capabilities = frozenset({"timeout", "async_functions"})
    queues = True
    Config = HybridConfig

    def __init__(self, config: HybridConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._parts: list[_Part] = []

    @classmethod
    def needs_functions(cls, config: PluginConfig) -> bool:
        return any(
            section.function is None
            and manager_class(inner := section.manager or NAIVE).needs_functions(inner)
            for section in config.scorers.values()
        )

    @classmethod
    def own_functions(cls, config: PluginConfig) -> Mapping[str, PluginSection]:
        own = {name: s.function for name, s in config.scorers.items() if s.function is not None}
        for name, section in config.scorers.items():
            inner = section.manager or NAIVE
            parts = manager_class(inner).own_functions(inner)
            own |= {f"{name}/{part}": function for part, function in parts.items()}
        return own

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        selected: dict[str, tuple[str, PluginSection]] = {}
        for name, section in config.scorers.items():
            selected[f"scorers.{name}.manager"] = ("reward_manager", section.manager or NAIVE)
            if section.function is not None:
                selected[f"scorers.{name}.function"] = ("reward_function", section.function)
        return selected

    def start(self) -> None:
        """Construct every scorer's functions and manager, and start the managers.

        Raises:
            ConfigError: a manager scores whole groups, or has no reward functions.
            PluginError: a function or a manager can't be loaded.
        """
        for name, section in self.config.scorers.items():
            context = self.context
            if section.function is not None:
                functions = configured_functions(
                    RewardSection(function=section.function), PluginContext(seed=context.seed)
                )
                context = attrs.evolve(context, reward_functions=functions)
            inner = InnerManager.open(
                ref_for("reward_manager", section.manager or NAIVE),
                attrs.evolve(context, role=name),
                f"reward.manager.scorers.{name}.manager",
                "hybrid",
            )
            self._parts.append(_Part(name, section, inner))

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        assert self._parts, "the reward manager is not started"
        return list(await asyncio.gather(*(self._score(s, time) for s in samples)))

    async def _score(self, sample: Sample, time: RunningTime) -> Outcome:
        scores: dict[str, Score] = {}
        gated = False
        for stage in self._stages():
            outcomes = await asyncio.gather(*(part.inner.score(sample, time) for part in stage))
            for part, outcome in zip(stage, outcomes, strict=True):
                if isinstance(outcome, Failure):
                    return attrs.evolve(outcome, message=f"scorer {part.name!r}: {outcome.message}")
                scores[part.name] = outcome
            gate = stage[-1].section.gate
            gated = gate is not None and scores[stage[-1].name].value < gate
            if gated:
                break
        return self._sum(sample, scores, gated=gated)

    def _stages(self) -> Iterator[list[_Part]]:
        """Yield lists of scorers that run concurrently, in order. Each list ends with a scorer that has a gate, except perhaps the last."""
        stage: list[_Part] = []
        for part in self._parts:
            stage.append(part)
            if part.section.gate is not None:
                yield stage
                stage = []
        if stage:
            yield stage

    def _sum(self, sample: Sample, scores: Mapping[str, Score], *, gated: bool) -> Outcome:
        components: dict[str, float] = {}
        extras: dict[str, Any] = {}
        value, has_gates = 0.0, False
        for part in self._parts:
            has_gates |= part.section.gate is not None
            score = scores.get(part.name)
            components[part.name] = part.section.skipped if score is None else score.value
            value += part.section.weight * components[part.name]
            if score is not None:
                components |= {f"{part.name}/{key}": x for key, x in score.components.items()}
                extras |= {f"{part.name}/{key}": x for key, x in score.extras.items()}
        if has_gates:
            components[GATED] = float(gated)
        if gated and self.config.gated_score is not None:
            return Score(value=self.config.gated_score, components=components, extras=extras)
        if finite_float(value) is None:
            message = f"the weighted sum of scores of sample {sample.sample_id} is {value}; expected a finite number"
            return Failure(kind=FailureKind.INVALID_VALUE, message=message)
        return Score(
            value=value,
            token_rewards=self._token_rewards(sample, scores, value),
            components=components,
            extras=extras,
        )

    def _token_rewards(
        self, sample: Sample, scores: Mapping[str, Score], value: float
    ) -> np.ndarray | None:
        """Return the sum of the scorers' weighted token rewards, float32 [T]; None if no scorer gave token rewards.

        The reward of the last token is adjusted so that the rewards add up to `value`, the sample's reward.
        """
        weights = {part.name: part.section.weight for part in self._parts}
        given = [
            weights[name] * np.asarray(given_T, np.float64)
            for name, score in scores.items()
            if (given_T := score.on_tokens(sample)) is not None and len(given_T)
        ]
        if not given:
            return None
        rewards_T = np.zeros(max(map(len, given)))
        for part_T in given:
            rewards_T[: len(part_T)] += part_T
        rewards_T[-1] += value - rewards_T.sum()
        return rewards_T.astype(np.float32)

    def sleep(self) -> None:
        for part in self._parts:
            part.inner.manager.sleep()

    def close(self) -> None:
        for part in self._parts:
            part.inner.manager.close()
        self._parts.clear()


@attrs.frozen(eq=False)
class _Part:
    """A scorer: its name, its config section and its started manager."""

    name: str
    section: ScorerSection
    inner: InnerManager
