"""Endpoint: a teacher behind a server with vLLM's `/v1/completions`, which scores the tokens of prompts (`prompt_logprobs`).

A sample is one request with the token ids of prompt and response. The server answers with log-probabilities at temperature 1, of each
token and of the most likely words (vocabulary tokens) at its position. Legend: N samples, T response tokens, packed end to end, K words.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import ConfigError, DovetailError, WorkerError
from dovetail.interfaces import PluginContext
from dovetail_distillation.columns import LOG_PROBS, TOP_IDS, TOP_LOG_PROBS
from dovetail_distillation.config import EndpointSection
from dovetail_distillation.servers import TeacherServers

if TYPE_CHECKING:
    from httpx2 import AsyncClient

    from dovetail.interfaces import Tokenizer

RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a retry may succeed."""
FIRST_WAIT = 0.5
"""Seconds before the first retry. The wait doubles with each retry, and is shortened by a random part."""
PROBED = 48
"""Maximum number of words (vocabulary tokens) whose texts `Endpoint.check` compares with those of the run's tokenizer."""


class TeacherError(DovetailError, RuntimeError):
    """A served teacher can't be reached, or does not give log-probabilities."""


@attrs.define(kw_only=True, eq=False)
class _RetryableError(Exception):
    """A failure of a request that may succeed if it is retried."""

    what: str


class Endpoint:
    """A client of a served teacher, which is one of the stage's `endpoints`.

    Args:
        name: the name of the endpoint in the config, for messages.
        section: the endpoint's section.
        context: the context of the stage; its runtime starts the servers if the section has `serve` (errors: see `TeacherServers`).
    """

    def __init__(
        self, name: str, section: EndpointSection, context: PluginContext | None = None
    ) -> None:
        self._name, self._section = name, section
        self._servers: TeacherServers | None = None
        if section.serve is not None:
            self._servers = TeacherServers(name, section, context or PluginContext())
            self._where = "servers of this run"
        else:
            self._where = str(section.url)
        self._url = f"{(section.url or '').rstrip('/')}/v1/completions"

    def check(self, tokenizer: Tokenizer) -> None:
        """Let the server score a few words, and check that it decodes them to the same texts as the run's tokenizer.

        Raises:
            TeacherError: the server can't be reached, has no such model, or gives no log-probabilities of prompts.
            ConfigError: the server's model has another vocabulary.
        """
        words = _plain_words(tokenizer)
        answer = asyncio.run(self._one(list(words), 0))
        for word, entry in zip(list(words)[1:], answer[1:], strict=True):
            theirs = _entry(entry, word).get("decoded_token")
            if theirs is not None and theirs != words[word]:
                raise ConfigError(
                    f"{self._who} has another vocabulary than the student: token {word} decodes to {theirs!r}; expected {words[word]!r}",
                    hint="choose a teacher with the student's tokenizer",
                )

    async def score(self, batch: Batch, top_k: int) -> Batch:
        """Score samples: each token's log-probability, and the K most likely words at each position.

        Args:
            batch: N samples with `prompt_ids`, `response_ids`, `response_mask` and `temperature`.
            top_k: the number K of most likely words; 0 for none.

        Returns:
            The columns `teacher_log_probs` (float32 [T], for T response tokens), `teacher_top_ids` (int32 [T, K]) and
            `teacher_top_log_probs` (float32 [T, K]); masked tokens hold 0.

        Raises:
            TeacherError: a request failed on every try.
            ConfigError: samples were drawn at a temperature other than 1.
        """
        wrong = batch["temperature"][batch["temperature"] != 1]
        if wrong.size:
            raise ConfigError(
                f"{self._who} can't score samples drawn at temperature {wrong[0]:g}: a served teacher gives log-probabilities at temperature 1",
                hint="set rollout.temperature=1, or configure the teacher as a role instead of an endpoint",
            )
        mask: Ragged = batch["response_mask"]
        log_probs_T = np.zeros(mask.total, np.float32)
        ids_TK = np.zeros((mask.total, top_k), np.int32)
        top_TK = np.zeros((mask.total, top_k), np.float32)
        busy = asyncio.Semaphore(self._section.concurrency)
        async with self._client() as client:

            async def one(row: int) -> None:
                prompt, response = batch["prompt_ids"][row], batch["response_ids"][row]
                shown = np.flatnonzero(mask[row])
                if not shown.size:
                    return
                scored = response[: shown[-1] + 1]
                async with busy:
                    ids = [*prompt.tolist(), *scored.tolist()]
                    answer = await self._retried(client, ids, top_k)
                for step in shown:
                    place = mask.offsets[row] + step
                    entry = answer[len(prompt) + step]
                    log_probs_T[place] = _entry(entry, int(response[step]))["logprob"]
                    ids_TK[place], top_TK[place] = self._top(entry, top_k)

            try:
                async with asyncio.TaskGroup() as group:
                    for row in range(len(batch)):
                        group.create_task(one(row))
            except* TeacherError as errors:
                # The task group cancels all requests after the first failure, whose error names the cause.
                raise errors.exceptions[0] from None
        columns = {LOG_PROBS: log_probs_T, TOP_IDS: ids_TK, TOP_LOG_PROBS: top_TK}
        return Batch({name: mask.with_values(values) for name, values in columns.items()})

    @property
    def _who(self) -> str:
        return f"teacher {self._name!r} ({self._section.model} at {self._where})"

    def close(self) -> None:
        """End the servers that were started for this endpoint; safe to call twice."""
        if self._servers is not None:
            self._servers.close()

    def _client(self) -> AsyncClient:
        import httpx2

        headers = {}
        if (name := self._section.auth_env) is not None:
            if not (secret := os.environ.get(name)):
                raise ConfigError(
                    f"auth_env of {self._who} names the environment variable {name!r}, which is not set",
                    hint=f"export {name}=…",
                )
            headers["Authorization"] = f"Bearer {secret}"
        limits = httpx2.Limits(max_connections=self._section.concurrency)
        # httpx2's time-outs apply to each read, so a slow server could exceed them; `_post` limits the whole request.
        return httpx2.AsyncClient(headers=headers, timeout=None, limits=limits)

    async def _one(self, ids: list[int], top_k: int) -> list[dict[str, Any] | None]:
        async with self._client() as client:
            return await self._retried(client, ids, top_k)

    async def _retried(
        self, client: AsyncClient, ids: list[int], top_k: int
    ) -> list[dict[str, Any] | None]:
        """Return the server's log-probabilities at each token of a sequence, with retries; None for the first token.

        Raises:
            TeacherError: every try failed, or the answer is malformed.
        """
        tries = self._section.retries + 1
        for number in range(tries):
            if number:
                await asyncio.sleep(FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.5, 1))
            try:
                answer = await self._post(client, ids, top_k)
            except _RetryableError as error:
                what = error.what
                continue
            return self._of_tokens(answer, ids)
        raise TeacherError(
            f"{self._who} {what} ({tries} {'try' if tries == 1 else 'tries'})",
            hint="check that the server runs; if it is slow, raise `timeout` or lower `concurrency` of the endpoint",
        )

    async def _post(self, client: AsyncClient, ids: list[int], top_k: int) -> dict[str, Any]:
        import httpx2

        request = {
            "model": self._section.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": top_k,
        }
        try:
            async with asyncio.timeout(self._section.timeout):
                if self._servers is not None:
                    status, text = await self._servers.post(request)
                else:
                    reply = await client.post(self._url, json=request)
                    status, text = reply.status_code, reply.text
        except TimeoutError:
            raise _RetryableError(
                what=f"did not answer within {self._section.timeout:g} s"
            ) from None
        except httpx2.HTTPError as error:
            raise _RetryableError(
                what=f"can't be reached: {type(error).__name__}: {error}"
            ) from error
        except WorkerError as error:
            raise _RetryableError(what=f"lost a server: {error}") from error
        if status in RETRYABLE_STATUS:
            raise _RetryableError(what=f"answered with status {status}")
        if status != 200:
            raise TeacherError(
                f"{self._who} answered with status {status}: {text[:300]}",
                hint="check that `model` is a name that the server lists under /v1/models, and that top_k is at most vLLM's "
                "--max-logprobs",
            )
        try:
            answer: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise TeacherError(
                f"{self._who} answered with {text[:200]!r}; expected JSON"
            ) from error
        return answer

    def _of_tokens(self, answer: dict[str, Any], ids: list[int]) -> list[dict[str, Any] | None]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        found = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
        if found is None:
            raise TeacherError(
                f"{self._who} answered without the field prompt_logprobs, the log-probabilities of a prompt",
                hint="serve the teacher with vLLM, whose /v1/completions returns the field, or configure the teacher as a role",
            )
        if len(found) != len(ids):
            raise TeacherError(
                f"{self._who} answered with prompt_logprobs of {len(found)} tokens; expected {len(ids)}, as many as were sent",
                hint="use a server that accepts token ids as a prompt and adds no tokens, such as vLLM",
            )
        for place, word in enumerate(ids[1:], start=1):
            value = _entry(found[place], word).get("logprob")
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise TeacherError(
                    f"{self._who} returned the log-probability {value!r} for token id {word} at position {place}; expected a finite number"
                )
        tokens: list[dict[str, Any] | None] = found
        return tokens

    def _top(self, entry: dict[str, Any] | None, top_k: int) -> tuple[list[int], list[float]]:
        """Return the ids of the K most likely words at a position, the likeliest first, and their log-probabilities.

        Args:
            entry: the server's answer for the position: token id as text → a mapping with `logprob`.
            top_k: the number K.

        Raises:
            TeacherError: the answer has fewer than K words.
        """
        found = sorted(
            ((w["logprob"], int(word)) for word, w in (entry or {}).items()), reverse=True
        )
        if len(found) < top_k:
            raise TeacherError(
                f"{self._who} returned the log-probabilities of {len(found)} token id(s) at a position; expected top_k={top_k}",
                hint="lower top_k to at most what the server returns, or raise its limit (vLLM's --max-logprobs)",
            )
        best = found[:top_k]
        return [word for _, word in best], [value for value, _ in best]


def _entry(entry: dict[str, Any] | None, word: int) -> dict[str, Any]:
    """Return the server's data on a word at one position (`logprob`, `decoded_token`); empty if the answer `entry` lacks the word."""
    found = (entry or {}).get(str(word))
    return found if isinstance(found, dict) else {}


def _plain_words(tokenizer: Tokenizer) -> dict[int, str]:
    """Return up to `PROBED` tokens with printable ASCII texts, spread over the vocabulary, as token id → text.

    Raises:
        ConfigError: the vocabulary has fewer than two such tokens.
    """
    size = len(tokenizer)
    found = {}
    for word in range(size):
        text = tokenizer.decode([word])
        if text.isascii() and text.strip().isprintable() and text.strip():
            found[word] = text
    if len(found) < 2:
        raise ConfigError(
            "the vocabulary of a served teacher can't be checked: the run's tokenizer has fewer than two printable ASCII tokens"
        )
    words: Sequence[int] = list(found)
    every = max(1, len(words) // PROBED)
    return {word: found[word] for word in words[::every][:PROBED]}
