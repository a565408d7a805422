"""The reward manager `remote`: scores by a service over HTTP, or by worker processes on the runtime's machines.

The README gives the schema of the service's JSON batches.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
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
)
from dovetail.sections import PluginSection
from dovetail_rewards.manager_config import RemoteConfig
from dovetail_rewards.managers.collector import BatchQueue
from dovetail_rewards.managers.http_post import HttpPost, PostError, credential
from dovetail_rewards.managers.inner import NAIVE, manager_class
from dovetail_rewards.managers.scoring_workers import ScoringWorkers
from dovetail_rewards.urls import without_secrets
from dovetail_rollouts import outcome_from

SCHEMA = 1
"""Version of the request and answer schema."""


@attrs.frozen(kw_only=True, eq=False)
class _Sent:
    """A sample to send, with its time limit."""

    sample: Sample
    limit: float | None
    """Seconds that scoring the sample may take."""


class RemoteManager(RewardManager):
    """Sends batches of samples to a scoring service or to worker processes.

    `url` names an HTTP service: see `HttpService`. `workers` is the number of processes that the runtime starts on its machines. Each
    process runs the reward manager that the option `manager` selects, with the run's reward functions: see `ScoringWorkers`.

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
            ConfigError: the environment lacks the credential, the runtime can't start workers, or the functions can't be constructed in
                another process.
            DovetailError: a worker could not start.
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
        with time.waiting():  # the worker enforces the limit, from the start of the work
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


class HttpService:
    """Posts batches of samples to `url`, and reads one score per sample from the answer.

    Request: `{"schema": 1, "samples": [{"sample_id", "data_source", "prompt", "solution_str", "ground_truth",
    "extra_info", "finish_reason"}, …]}`, also `response_ids` if configured, and an episode's `trajectory`. Answer, with status 200:
    `{"results": [entry, …]}`, with one entry per sample in order: a finite number, a mapping with `score` and further values, as a
    reward function returns it, or `{"error": text, "retryable": bool}`.

    A failed connection and the statuses 408, 425, 429, 500, 502, 503 and 504 are `unreachable` failures, which may be retried. Any other
    status is an `exception`. An invalid answer, or one over 64 MiB, is an `invalid_value`.

    Args:
        config: a config whose `url` is set.
        url: the address of the service, as in the config.
    """

    def __init__(self, config: RemoteConfig, url: str) -> None:
        self._config, self._url = config, url
        self._post = HttpPost(url, {})

    def start(self) -> None:
        """Read the credential.

        Raises:
            ConfigError: the environment lacks the credential.
        """
        secret = credential(self._config.auth_env, "remote")
        if secret is not None:
            value = f"{self._config.auth_scheme} {secret}".strip()
            self._post = HttpPost(self._url, {self._config.auth_header: value})

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        bodies = [self._body(sample) for sample in samples]
        sent = [body for body in bodies if isinstance(body, str)]
        answers = iter(await self._scored(sent) if sent else ())
        return [body if isinstance(body, Failure) else next(answers) for body in bodies]

    def _body(self, sample: Sample) -> str | Failure:
        fields = {"sample_id": sample.sample_id, **sample.arguments()}
        if not self._config.response_ids:
            del fields["response_ids"]
        if sample.trajectory is None:
            del fields["trajectory"]
        try:
            return json.dumps(fields, default=_plain, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"the row of sample {sample.sample_id} can't be written as JSON: {error}"
            return Failure(kind=FailureKind.EXCEPTION, message=message)

    async def _scored(self, bodies: Sequence[str]) -> list[Outcome]:
        """Send samples, each a JSON object, in one request, and return their scores or failures in order."""
        content = f'{{"schema": {SCHEMA}, "samples": [{", ".join(bodies)}]}}'.encode()
        try:
            answer = await self._post.post(content)
        except PostError as none:
            return [self._failure(none.kind, none.what, retryable=none.retryable)] * len(bodies)
        return self._judge(answer, len(bodies))

    def _judge(self, content: bytes, count: int) -> list[Outcome]:
        try:
            results = json.loads(content)["results"]
        except (ValueError, TypeError, KeyError, RecursionError):
            what = f"answered with {content[:80]!r}; expected {{'results': […]}}"
            return [self._failure(FailureKind.INVALID_VALUE, what)] * count
        if not isinstance(results, list) or len(results) != count:
            given = f"{len(results)} results" if isinstance(results, list) else repr(results)[:80]
            what = f"answered with {given} for {count} samples; expected one result for each"
            return [self._failure(FailureKind.INVALID_VALUE, what)] * count
        return [self._outcome(result) for result in results]

    def _outcome(self, result: object) -> Outcome:
        if isinstance(result, Mapping) and result.get("error") is not None:
            what = f"could not score the sample: {str(result['error'])[:300]}"
            again = result.get("retryable") is True
            return self._failure(FailureKind.EXCEPTION, what, retryable=again)
        return outcome_from(result, without_secrets(self._url))

    def _failure(self, kind: FailureKind, what: str, *, retryable: bool = False) -> Failure:
        return Failure(
            kind=kind, message=f"{without_secrets(self._url)} {what}", retryable=retryable
        )

    def close(self) -> None:
        """Close the open connections."""
        self._post.close()


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")
