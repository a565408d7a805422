"""RewardManager and RewardFunction: a sample becomes a score or a failure, never a failure that looks like a score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from dovetail.interfaces.plugin import Plugin

REWARD_MANAGER_API = "1.0"
REWARD_FUNCTION_API = "1.0"


class FailureKind(StrEnum):
    """Why a sample has no score."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    INVALID_VALUE = "invalid_value"
    UNREACHABLE = "unreachable"
    CRASH = "crash"


@attrs.frozen(kw_only=True, eq=False)
class RewardSample:
    """What a reward is computed from."""

    sample_id: str
    """Unique in the step."""
    prompt: Any
    """The row's prompt: a list of messages or a plain string."""
    solution_str: str
    """The response as text, special tokens removed."""
    data_source: str | None = None
    """The row's `data_source`, where it has one."""
    ground_truth: Any = None
    """The row's `reward_model.ground_truth`."""
    extra_info: Mapping[str, Any] | None = None
    """The row's `extra_info`."""
    response_ids: np.ndarray | None = None
    """int64 [T]"""
    finish_reason: str = "stop"


@attrs.frozen(kw_only=True)
class RewardUnit:
    """What is scored together: one sample, or a whole group where the manager's `unit` is "group"."""

    samples: tuple[RewardSample, ...]


@attrs.frozen(kw_only=True, eq=False)
class Score:
    """A reward. `value` is finite in float32."""

    value: float
    """The sample's scalar reward."""
    token_rewards: np.ndarray | None = None
    """float32 [T]: a reward for each response token, where the function gives them; sums to `value`."""
    components: Mapping[str, float] = attrs.field(factory=dict)
    """Named parts of the reward, logged apart."""
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    """Anything else that the function returned; written with the samples."""


@attrs.frozen(kw_only=True)
class Failure:
    """No score could be had. Never a number."""

    kind: FailureKind
    message: str
    retryable: bool = False


Outcome = Score | Failure


class RewardManager(Plugin):
    """Scores units as they finish."""

    unit: ClassVar[Literal["sample", "group"]] = "sample"
    """Whether `score` gets single samples or whole groups."""

    @property
    def capacity(self) -> int | None:
        """Units it really works on at once; None means any number.

        The Scorer starts no more, so that a time-out counts running time and not waiting time.
        """
        return None

    @abstractmethod
    async def score(self, unit: RewardUnit) -> list[Outcome]:
        """One outcome a sample, in order. Raises nothing for a failing sample: that is a Failure.

        It is cancelled when the unit's time is up: what it runs is then to be stopped or left behind.
        """


class RewardFunction(Plugin):
    """Scores one sample by rule. In a user's file a plain function with `compute_score`'s signature does as well."""

    @abstractmethod
    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> float | Mapping[str, Any]:
        """A finite number, or a mapping with `score` and further parts."""

    @classmethod
    def check_row(cls, config: Any, ground_truth: Any) -> str | None:
        """Why this ground truth can't be scored, or None; asked for every row before training."""
        return None
