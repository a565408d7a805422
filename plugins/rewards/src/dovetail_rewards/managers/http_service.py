"""HttpService: scoring by a service over HTTP, in JSON batches. The README gives the schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.interfaces import Failure, FailureKind, Outcome, Sample, outcome_from
from dovetail_rewards.manager_config import RemoteConfig
from dovetail_rewards.managers.event_loop import AsyncLane
from dovetail_rewards.managers.http_post import HttpPost, PostError, credential
from dovetail_rewards.managers.threads import HungCalls
from dovetail_rewards.urls import without_secrets

SCHEMA = 1
"""Version of the schema."""
_CLOSE = 2.0
"""Seconds for open connections to be closed."""


class HttpService:
    """Posts batches of samples to `url`, and reads the answer as scores, one entry a sample.

    Request: `{"schema": 1, "samples": [{"sample_id", "data_source", "prompt", "solution_str", "ground_truth",
    "extra_info", "finish_reason"}, …]}`, `response_ids` where asked for, and `trajectory` of an episode. Answer, with
    status 200: `{"results": [entry, …]}`, one for each sample in order: a finite number, a mapping with `score` and
    further parts, or `{"error": text, "retryable": bool}`.

    No connection, and the statuses 408, 425, 429, 500, 502, 503 and 504, are `unreachable` and may be tried
    again; any other status is an `exception`; anything else in the place of results, and an answer of over 64 MiB, is an
    `invalid_value`.

    Args:
        config: its `url` is set.
        url: the same.
    """

    def __init__(self, config: RemoteConfig, url: str) -> None:
        self._config, self._url = config, url
        self._lane = AsyncLane(HungCalls(config.calls))
        self._post = HttpPost(url, {})

    def start(self) -> None:
        """Read the credential.

        Raises:
            ConfigError: the environment does not hold it.
        """
        secret = credential(self._config.auth_env, "remote")
        if secret is not None:
            value = f"{self._config.auth_scheme} {secret}".strip()
            self._post = HttpPost(self._url, {self._config.auth_header: value})

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        bodies = [self._body(sample) for sample in samples]
        sent = [body for body in bodies if isinstance(body, str)]
        answers = iter(await self._lane.run(self._scored(sent)) if sent else ())
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
            message = f"the row of {sample.sample_id} can't be written as JSON: {error}"
            return Failure(kind=FailureKind.EXCEPTION, message=message)

    async def _scored(self, bodies: Sequence[str]) -> list[Outcome]:
        """One request; on the lane's loop, where the client lives. `reward.timeout` is what limits its time."""
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
            what = f"answered with what is no {{'results': […]}}: {content[:80]!r}"
            return [self._failure(FailureKind.INVALID_VALUE, what)] * count
        if not isinstance(results, list) or len(results) != count:
            given = f"{len(results)} results" if isinstance(results, list) else repr(results)[:80]
            what = f"answered with {given} for {count} samples"
            return [self._failure(FailureKind.INVALID_VALUE, what)] * count
        return [self._outcome(result) for result in results]

    def _outcome(self, result: object) -> Outcome:
        if isinstance(result, Mapping) and result.get("error") is not None:
            what = f"could not score it: {str(result['error'])[:300]}"
            again = result.get("retryable") is True
            return self._failure(FailureKind.EXCEPTION, what, retryable=again)
        return outcome_from(result, without_secrets(self._url))

    def _failure(self, kind: FailureKind, what: str, *, retryable: bool = False) -> Failure:
        return Failure(
            kind=kind, message=f"{without_secrets(self._url)} {what}", retryable=retryable
        )

    def close(self) -> None:
        """Close the open connections."""
        self._lane.finish(self._post.close(), _CLOSE)
        self._lane.close()


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
