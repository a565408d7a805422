"""The reward manager `batch`: calls functions on lists of samples, which it collects while other samples are still generated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dovetail.interfaces import Failure, FailureKind, Outcome, PluginContext, RunningTime, Sample
from dovetail_rewards.manager_config import BatchConfig
from dovetail_rewards.managers.collector import BatchQueue
from dovetail_rewards.managers.function_manager import FunctionManager, InProcessCalls
from dovetail_rollouts import RewardCall, outcomes_from


class BatchManager(FunctionManager):
    """Calls reward functions on lists of samples.

    A function is `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, with any of these arguments by name, or
    `compute_reward(responses, ground_truths)`, with its arguments by position.

    A call is made when `size` samples of one function have gathered, or the first sample has waited `wait_ms`. At most `calls` run at once,
    in threads of this process; further samples wait. `reward.timeout` holds for a call. A function on single samples is called for one
    sample after the other.

    An entry of the result that is not a valid reward fails only its own sample. A result of the wrong length fails every sample of the
    call. If a call raises and the option `split` is set, each half of its list is scored by a call of its own, halved again if it raises,
    so that only the samples that cause the error fail.
    """

    name = "batch"
    api = ">=1.0,<2"
    capabilities = frozenset({"timeout", "async_functions"})
    queues = True
    Config = BatchConfig

    def __init__(self, config: BatchConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._calls = InProcessCalls(config.max_hung)
        self._collectors: dict[RewardCall, BatchQueue[Sample]] = {}

    async def _run(self, call: RewardCall, sample: Sample, time: RunningTime) -> Outcome:
        if call not in self._collectors:
            config = self.config
            self._collectors[call] = BatchQueue[Sample](
                lambda samples: self._score_list(call, samples),
                size=config.size,
                wait=config.wait_ms / 1000,
                calls=config.calls,
            )
        return await self._collectors[call].submit(sample, time)

    async def _score_list(self, call: RewardCall, samples: Sequence[Sample]) -> list[Outcome]:
        if call.form != "list":
            return [await self._calls.outcome(call, partial(call, sample)) for sample in samples]
        value = await self._calls.value(call, partial(call.on_list, samples))
        if not isinstance(value, Failure):
            return outcomes_from(value, len(samples), call.name)
        if len(samples) == 1 or value.kind is not FailureKind.EXCEPTION or not self.config.split:
            return [value] * len(samples)
        middle = len(samples) // 2
        first = await self._score_list(call, samples[:middle])
        return first + await self._score_list(call, samples[middle:])

    def close(self) -> None:
        self._calls.close()
