"""RewardManager and RewardFunction: give each sample a score or a failure, which never looks like a score."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from dovetail.interfaces.data import GroundTruth, Prompt
from dovetail.interfaces.plugin import Plugin, PluginConfig
from dovetail.interfaces.rollout import Completion
from dovetail.interfaces.trajectory import Trajectory
from dovetail.sections import PluginSection


class FailureKind(StrEnum):
    """The reason why a sample has no score."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    INVALID_VALUE = "invalid_value"
    UNREACHABLE = "unreachable"
    CRASH = "crash"
    PROVIDER = "provider"
    """Failure of another model that the episode calls."""
    TOOL = "tool"
    SANDBOX = "sandbox"
    ENVIRONMENT = "environment"
    HARNESS = "harness"
    """Failure of the agent loop itself."""
    LIMIT = "limit"
    """A time limit was exceeded."""


class RunningTime:
    """The time limit of one call of `RewardManager.score`. Running time counts; waiting time in a queue does not.

    Args:
        limit: the limit in seconds; None for no limit.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self._waits = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop counting time within the block. If several samples of a group wait, counting resumes when none waits."""
        self._waits += 1
        if self._waits == 1:
            self.stop()
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0:
                self.go_on()

    def stop(self) -> None:
        """Stop the clock of the time limit. A subclass that enforces the limit overrides this method."""

    def go_on(self) -> None:
        """Let the clock of the time limit run on after `stop`. A subclass that enforces the limit overrides this method."""


class CountedTime(RunningTime):
    """A time limit that extends an asyncio time-out by the time that samples spend waiting.

    Args:
        seconds: the running time that one call of `RewardManager.score` may take.
        limit: the time-out to extend.
    """

    def __init__(self, seconds: float, limit: asyncio.Timeout) -> None:
        super().__init__(seconds)
        self._limit = limit
        self._left: float | None = None

    def stop(self) -> None:
        when = self._limit.when()
        if when is not None and not self._limit.expired():
            self._left = when - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def go_on(self) -> None:
        # `_left` is None if the time-out had expired before `stop`, and the wait is unwinding.
        if self._left is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left)
            self._left = None


@attrs.frozen(kw_only=True, eq=False)
class Score:
    """The reward of a sample, finite in float32."""

    value: float
    """The sample's scalar reward."""
    token_rewards: np.ndarray | None = None
    """float32 [T]: a reward for each token of `Sample.response_ids`, with the sum `value`; 0 on tokens that the policy did not
    produce. None if the function gives no token rewards."""
    turn_rewards: tuple[float, ...] | None = None
    """A reward for each turn of an episode, with the sum `value`, in place of `token_rewards`; each goes to the last token of the turn."""
    components: Mapping[str, float] = attrs.field(factory=dict)
    """Named parts of the reward, each logged as a metric of its own."""
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    """Further values that the function returned, which are written with the samples."""

    def on_tokens(self, sample: Sample) -> np.ndarray | None:
        """Return the token rewards, float32 [T], or the turn rewards on the last tokens of their turns; None if there are neither."""
        trajectory = sample.trajectory
        if self.turn_rewards is None or trajectory is None or not sample.sequences:
            return self.token_rewards
        lengths_S = [len(sequence.response_ids) for sequence in sample.sequences]
        starts_S = np.cumsum([0, *lengths_S])
        rewards_T = np.zeros(starts_S[-1], np.float32)
        produced_K = np.flatnonzero(sample.produced_T)
        if len(produced_K):
            # A turn without a token has its reward on the last token before it.
            stops = [starts_S[turn.sequence] + turn.stop for turn in trajectory.turns]
            ends = np.searchsorted(produced_K, stops) - 1
            np.add.at(rewards_T, produced_K[np.maximum(ends, 0)], self.turn_rewards)
        return rewards_T


@attrs.frozen(kw_only=True)
class Failure:
    """A failure to score a sample, which is never converted to a number."""

    kind: FailureKind
    message: str
    retryable: bool = False


Outcome = Score | Failure


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """One response to a prompt, from its generation to its reward."""

    sample_id: str
    """Id of the sample, unique in the step."""
    prompt: Prompt
    """The row of data that the sample answers."""
    text: str
    """The response without special tokens. For an episode: the turns of the policy, separated by line breaks."""
    completion: Completion | None = None
    """The sample's tokens; those of the last sequence if there are several. None if the run did not generate the scored text."""
    earlier: tuple[Completion, ...] = ()
    """The sequences before the last, if the episode has several (`Session.fork`)."""
    outcome: Outcome | None = None
    """The score or the failure; None until the sample is scored."""
    trajectory: Trajectory | None = None
    """The turns of the sample's episode; None if the sample is one response to the prompt."""
    group: int = 0
    """Index of the sample's group among all groups of the step, from 0, counted over all rounds of generation."""

    @property
    def score(self) -> float | None:
        """The reward; None if scoring failed or has not finished."""
        return self.outcome.value if isinstance(self.outcome, Score) else None

    @property
    def sequences(self) -> tuple[Completion, ...]:
        """The sample's token sequences to train on, in order; one unless the episode forked."""
        return self.earlier if self.completion is None else (*self.earlier, self.completion)

    @property
    def response_ids(self) -> np.ndarray:
        """int64 [T]: the response tokens of all sequences, end to end; empty if unknown."""
        return _end_to_end([sequence.response_ids for sequence in self.sequences], np.int64)

    @property
    def produced_T(self) -> np.ndarray:
        """The tokens of `response_ids` that the policy produced, as a mask, bool [T]."""
        return _end_to_end([sequence.produced_T for sequence in self.sequences], np.bool_)

    @property
    def response_length(self) -> int:
        """Number of tokens that the policy produced; 0 if unknown."""
        return int(self.produced_T.sum())

    def arguments(self) -> dict[str, Any]:
        """Return the values that a reward function can take as parameters, by name."""
        prompt, completion = self.prompt, self.completion
        return {
            "data_source": prompt.data_source,
            "prompt": prompt.raw,
            "solution_str": self.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "finish_reason": "stop" if completion is None else str(completion.finish_reason),
            "response_ids": None if completion is None else self.response_ids,
            "trajectory": None if self.trajectory is None else self.trajectory.as_json(),
        }

    def row(self) -> dict[str, Any]:
        """Return the sample as a JSON object, its line in `samples/step_N.jsonl`."""
        given = self.arguments()
        row = {
            "sample_id": self.sample_id,
            "prompt": given["prompt"],
            "response": self.text,
            "score": self.score,
            "ground_truth": given["ground_truth"],
            "data_source": given["data_source"],
            "finish_reason": given["finish_reason"],
            "response_length": self.response_length,
        }
        if self.trajectory is not None:
            row["trajectory"] = self.trajectory.as_json()
        if isinstance(self.outcome, Failure):
            row["failure"] = {"kind": str(self.outcome.kind), "message": self.outcome.message}
        elif self.outcome is not None:
            if self.outcome.components:
                row["components"] = dict(self.outcome.components)
            if self.outcome.extras:
                row["extras"] = dict(self.outcome.extras)
        return row


def _end_to_end(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])


class RewardManager(Plugin):
    """Scores samples, or whole groups, as they finish."""

    unit: ClassVar[Literal["sample", "group"]] = "sample"
    """Whether `score` gets single samples or whole groups."""
    queues: ClassVar[bool] = False
    """Whether the manager gets all calls at once and queues them itself, within `time.waiting()`. If so, `reward.concurrency` and
    `capacity` have no effect."""

    @classmethod
    def needs_functions(cls, config: PluginConfig) -> bool:
        """Return whether the manager scores with the functions of the reward section, so that every row needs such a function."""
        return True

    @classmethod
    def own_functions(cls, config: PluginConfig) -> Mapping[str, PluginSection]:
        """Return the section of each reward function that the manager's config selects, by the name that messages use for the function.

        Each of these functions must accept every ground truth.
        """
        return {}

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        """Return the kind and the config section of every plugin that `config` selects, by key path below `config`.

        The plan of a run and the record of its plugins, `plugins.lock.json`, list these plugins.
        """
        return {}

    @property
    def capacity(self) -> int | None:
        """Largest number of concurrent calls of `score`; None for any number.

        The scorer starts no more calls than this, so that a time-out counts running time and not waiting time.
        """
        return None

    @abstractmethod
    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        """Return a `Score` for each sample, in order. A sample whose scoring fails gets a `Failure` instead, and no error is raised.

        The call is cancelled when the time is up, and must then stop or abandon its work.

        Args:
            samples: one sample, or a whole group if `unit` is "group".
            time: the clock of the time-out. A manager with a queue stops the clock with `with time.waiting():` while
                samples wait.
        """

    def sleep(self) -> None:
        """Release memory that only scoring needs, after a rollout is scored. The next call of `score` allocates the memory again."""


class RewardFunction(Plugin):
    """Scores one sample. In a user's file, a plain function with the signature of `compute_score` works too.

    A plain function may set the attributes `pure` and `unit`, with the same meaning as in this class: whether scores may be cached, and
    whether a score depends on the other samples of the group. By default, a reward function scores rows whose `data_source` is the
    function's name or one of its aliases. In an alias, `*` stands for any text: `aime*`.
    """

    pure: ClassVar[bool] = False
    """Whether the same parameters always get the same score, so that scores may be cached by content."""
    unit: ClassVar[Literal["sample", "group"]] = "sample"
    """`group` if a score depends on the other samples of the group, so that the manager must score whole groups."""

    @abstractmethod
    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> float | Mapping[str, Any]:
        """Return a finite number, or a mapping with `score` and further components; may be async.

        In the mapping, `token_rewards` has a reward for each response token, or `turn_rewards` a reward for each turn of an episode.
        `score` is then the sum of these rewards, and may be left out.
        """

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        """Return why this ground truth can't be scored; None if it can. Called for every row before training."""
        return None

    @classmethod
    def of_function(cls, function: Callable[..., Any], name: str) -> type[RewardFunction]:
        """Return a RewardFunction class whose `compute_score` is a plain function, which gets the parameters that it declares."""
        return type(name, (RewardFunction,), {"compute_score": staticmethod(function)})
