"""`remote`: scoring elsewhere, by a service over HTTP or by worker processes on the runtime's machines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import attrs

from dovetail.interfaces import (
    Outcome,
    PluginConfig,
    PluginContext,
    RewardManager,
    RunningTime,
    Sample,
)
from dovetail.sections import PluginSection
from dovetail_rewards.manager_config import RemoteConfig
from dovetail_rewards.managers.collector import BatchQueue
from dovetail_rewards.managers.http_service import HttpService
from dovetail_rewards.managers.inner import NAIVE, manager_class
from dovetail_rewards.managers.scoring_workers import ScoringWorkers


@attrs.frozen(kw_only=True, eq=False)
class _Sent:
    """A sample on its way."""

    sample: Sample
    limit: float | None
    """Seconds that it may run."""


class RemoteManager(RewardManager):
    """Gathers samples into batches and has them scored elsewhere.

    With `url`, by a service: see `HttpService`. With `workers`, by processes that the runtime starts on its machines, each of
    which runs the manager that `manager` selects over the run's own functions: see `ScoringWorkers`.

    In a config:

        reward: {manager: {url: "http://127.0.0.1:8001/score"}}
    """

    name = "remote"
    api = ">=1.0,<2"
    capabilities = frozenset({"timeout", "service"})
    queues = True
    Config = RemoteConfig

    def __init__(self, config: RemoteConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._service: HttpService | None = None
        self._workers: ScoringWorkers | None = None
        calls = config.calls
        if config.url is not None:
            self._service = HttpService(config, config.url)
        else:
            self._workers = ScoringWorkers(config, context)
            calls *= config.workers or 1
        self._collector = BatchQueue[_Sent](
            self._score_batch, size=config.size, wait=config.wait_ms / 1000, calls=calls
        )

    @classmethod
    def needs_functions(cls, config: PluginConfig) -> bool:
        inner = config.manager or NAIVE
        return config.workers is not None and manager_class(inner).needs_functions(inner)

    @classmethod
    def own_functions(cls, config: PluginConfig) -> Mapping[str, PluginSection]:
        inner = config.manager or NAIVE
        return {} if config.workers is None else manager_class(inner).own_functions(inner)

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        if config.workers is None:
            return {}
        inner = config.manager or NAIVE
        below = manager_class(inner).selects(inner)
        return {
            "manager": ("reward_manager", inner),
            **{f"manager.{path}": chosen for path, chosen in below.items()},
        }

    def start(self) -> None:
        """Read the credential of the service, or start the workers.

        Raises:
            ConfigError: the environment does not hold the credential; or there is no runtime that starts workers, or the
                functions can't be made in another process.
            DovetailError: an error in a worker's start.
        """
        if self._service is not None:
            self._service.start()
        if self._workers is not None:
            self._workers.start()

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        sent = [_Sent(sample=sample, limit=time.limit) for sample in samples]
        if self._service is not None:
            waits = (self._collector.submit(one, time) for one in sent)
            return list(await asyncio.gather(*waits))
        with time.waiting():  # the worker sees to the limit, from when the sample is worked on
            return list(await asyncio.gather(*(self._collector.submit(one, time) for one in sent)))

    async def _score_batch(self, sent: Sequence[_Sent]) -> list[Outcome]:
        samples = [one.sample for one in sent]
        if self._service is not None:
            return await self._service.score(samples)
        assert self._workers is not None
        return await self._workers.score(samples, sent[0].limit)

    def sleep(self) -> None:
        if self._workers is not None:
            self._workers.sleep()

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._workers is not None:
            self._workers.close()
