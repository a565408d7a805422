"""A model behind a server with OpenAI's API, such as vLLM's or SGLang's: its samples, chat template, and comparison with a run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs
import httpx2
import numpy as np

from dovetail.errors import ConfigError, RequestRefusedError, RolloutError, WeightSyncError
from dovetail.interfaces import (
    BaseRollout,
    Completion,
    FinishReason,
    PauseMode,
    PluginContext,
    Prompt,
    RolloutRequest,
    SamplingParams,
    WeightManifest,
)
from dovetail.random_streams import SampleStream, stream_seed
from dovetail.sections import RolloutSection, RunConfig
from dovetail.telemetry import RunDirectory, read_rows, step_of

CONCURRENCY = 64
"""Maximum number of concurrent requests, each for one sample."""
SECONDS = 1800.0
"""Time limit of one request in seconds."""
TRIES = 4
"""Maximum number of attempts at a request."""
FIRST_PAUSE = 1.0
"""Seconds before the second attempt; twice as long before each further attempt."""
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a request is sent again."""
COMPARED = 8
"""Number of prompts for which the token counts of the server and the run are compared."""


@attrs.frozen(kw_only=True)
class ModelServer:
    """A running server with OpenAI's API, and one of its models."""

    url: str
    """Address before `/v1`, such as `http://127.0.0.1:8000`."""
    model: str
    """Name of the model on the server."""
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)

    @classmethod
    def find(cls, url: str, model: str | None, auth_env: str | None) -> ModelServer:
        """Connect to a server and ask for its model.

        Args:
            url: the server's address, with or without `/v1`.
            model: the name of one of the server's models; needed if the server has several models.
            auth_env: the environment variable that holds the server's API key.

        Raises:
            ConfigError: the environment variable is not set, or the model is unknown or ambiguous.
            RolloutError: the server can't be reached.
        """
        headers = {}
        if auth_env is not None:
            if not (key := os.environ.get(auth_env)):
                raise ConfigError(
                    f"the environment variable {auth_env!r} is not set", hint=f"export {auth_env}=…"
                )
            headers["Authorization"] = f"Bearer {key}"
        server = cls(url=url.rstrip("/").removesuffix("/v1"), model=model or "", headers=headers)
        try:
            answer = httpx2.get(f"{server.url}/v1/models", headers=headers, timeout=60)
            names = [str(each["id"]) for each in answer.raise_for_status().json()["data"]]
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise RolloutError(
                f"{server.url}/v1/models did not return a list of models: {type(error).__name__}: {error}",
                hint="give --served the address of a server with OpenAI's API, such as http://127.0.0.1:8000",
            ) from error
        if model is None and len(names) == 1:
            return attrs.evolve(server, model=names[0])
        if model not in names:
            raise ConfigError(
                f"the server {server.url} has the models {', '.join(names) or '(none)'}"
                + (
                    f", but not {model}" if model else "; expected exactly one, since none is named"
                ),
                hint="name one of its models with --served-model",
            )
        return server

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a request; retry if the server is busy or can't be reached.

        Raises:
            RequestRefusedError: the server refuses the request.
            RolloutError: the server does not answer.
        """
        problem = ""
        async with httpx2.AsyncClient(headers=dict(self.headers), timeout=SECONDS) as client:
            for number in range(TRIES):
                await asyncio.sleep(FIRST_PAUSE * 2 ** (number - 1) if number else 0)
                try:
                    answer = await client.post(f"{self.url}{path}", json=body)
                except httpx2.HTTPError as error:
                    problem = f"{type(error).__name__}: {error}"
                    continue
                if answer.status_code == 200:
                    return dict(answer.json())
                problem = f"status {answer.status_code}: {answer.text[:500]}"
                if answer.status_code not in BUSY:
                    raise RequestRefusedError(f"{self.url}{path} refused a request: {problem}")
        raise RolloutError(f"{self.url}{path} did not answer in {TRIES} attempts: {problem}")


class ServedRollout(BaseRollout):
    """Rollout on an external server. Token ids are sent to `/v1/completions`, so that the server's chat template is not used.

    Token ids of responses are used if the server returns them (vLLM's `return_token_ids`); otherwise the text is tokenised again.
    """

    name = "served"
    api = ">=1.0,<2"
    Config = RolloutSection

    def __init__(self, server: ModelServer, context: PluginContext) -> None:
        super().__init__(RolloutSection(name=self.name), context)
        self._server = server
        self._running: asyncio.Semaphore | None = None

    async def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        """Yield every sample of the request as it finishes; for errors see `ModelServer.ask`."""
        if request.media:
            raise RequestRefusedError(
                "the prompt has images, which /v1/completions does not accept",
                hint="use only prompts without images with --served",
            )
        tasks = [
            asyncio.ensure_future(self._sample(request, number)) for number in range(request.n)
        ]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, request: RolloutRequest, number: int) -> Completion:
        if self._running is None:  # bound to the current event loop
            self._running = asyncio.Semaphore(CONCURRENCY)
        body = {
            "model": self._server.model,
            "prompt": request.prompt_ids.tolist(),
            **_sampling(request.sampling, request.streams[number]),
        }
        async with self._running:
            answer = await self._server.ask("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            ended = choice["finish_reason"]
            ids = choice.get("token_ids") or self._tokens(choice["text"], ended == "stop")
        except (LookupError, TypeError) as error:
            raise RequestRefusedError(
                f"{self._server.url}/v1/completions answered {str(answer)[:200]!r}; expected `choices` with `text` and `finish_reason`"
            ) from error
        return Completion(
            request_id=request.request_id,
            sample=number,
            response_ids=np.array(ids, np.int64),
            finish_reason=FinishReason.LENGTH if ended == "length" else FinishReason.STOP,
            weight_versions=np.zeros(len(ids), np.int64),
        )

    def _tokens(self, text: str, stopped: bool) -> list[int]:
        tokenizer = self.context.tokenizer
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return [*ids, tokenizer.eos_token_id] if stopped else ids

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Do nothing: requests end by themselves."""

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Do nothing: the weights never change."""

    async def resume(self) -> None:
        """Do nothing: `pause` stops no requests."""

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        """Refuse new weights: the server keeps its weights.

        Raises:
            WeightSyncError: always.
        """
        raise WeightSyncError(
            f"weights can't be sent to {self._server.url}: this server is only evaluated, with the weights that it started with"
        )


def _sampling(sampling: SamplingParams, stream: SampleStream) -> dict[str, Any]:
    """Return a request's sampling fields, with the seed of `stream`.

    All fields are set, since servers take missing ones from the model's generation_config.json.
    """
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "seed": stream_seed(stream.seed, *stream.key(), stream.offset) >> 32,
        "return_token_ids": True,
    }


def check_template(
    config: RunConfig, server: ModelServer, prompts: Sequence[Prompt], tools: Any
) -> None:
    """Check that the chat templates of the server and the run give the same number of tokens for the first prompts.

    Prompts with media, and prompts that may have been shortened to `data.max_prompt_length`, are skipped.

    Raises:
        ConfigError: the numbers differ, or the server does not accept chat requests with the run's features, such as
            tools.
        RolloutError: the server can't be reached.
    """
    limit = config.data.max_prompt_length
    whole = [p for p in prompts if not p.media and len(p.prompt_ids) != limit]
    if config.data.plain_prompts == "raw":
        whole = [p for p in whole if not isinstance(p.raw, str)]
    for prompt in whole[:COMPARED]:
        messages = prompt.raw
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body: dict[str, Any] = {"model": server.model, "messages": messages, "max_tokens": 1}
        body["tools"] = list(tools) if tools else None
        try:
            answer = asyncio.run(server.ask("/v1/chat/completions", body))
        except RequestRefusedError as error:
            raise ConfigError(
                f"the server {server.url} refused {prompt} as a chat request: {error}",
                hint="start it with the command in the exported model's card (README.md), which names chat template and parsers",
            ) from error
        theirs = (answer.get("usage") or {}).get("prompt_tokens")
        if theirs != len(prompt.prompt_ids):
            raise ConfigError(
                f"{prompt} has {theirs} tokens on the server {server.url}, but {len(prompt.prompt_ids)} in the run: the chat templates or tokenizers differ",
                hint="start the server with the exported model's own template, or with --chat-template",
            )


@attrs.frozen(kw_only=True)
class RunFigure:
    """The 95% interval of a metric in a run's validation, and the server's value of this metric."""

    name: str
    low: float
    high: float
    served: float

    @property
    def inside(self) -> bool:
        """Whether the server's value is in the run's 95% interval, with a tolerance for rounding: sums may be in another order."""
        return self.low - 1e-6 <= self.served <= self.high + 1e-6


def beside_the_run(run: RunDirectory, step: int, metrics: Mapping[str, float]) -> list[RunFigure]:
    """Compare the server's metrics with the run's own validation after a step; return one result for each metric over all prompts.

    Args:
        run: the run that trained the model.
        step: the training step after which the run validated.
        metrics: the server's metrics, by name.

    Raises:
        ConfigError: the run has no validation after the step, or `metrics` lacks one of its metrics.
    """
    rows = read_rows(run.metrics)
    validated = {step_of(row): row for row in rows if any(name.startswith("val/") for name in row)}
    row = validated.get(step, {})
    wanted = [n.removesuffix("/low") for n in row if n.startswith("val/") and n.endswith("/low")]
    names = [name for name in wanted if name.count("/") == 1]
    if not names:
        found = ", ".join(f"{each:g}" for each in validated) or "no step"
        raise ConfigError(
            f"{run.path} has no validation after step {step} to compare with; it has validations after {found}",
            hint="name one of these steps, as RUN@STEP",
        )
    missing = [name for name in names if name not in metrics]
    if missing:
        raise ConfigError(
            f"this evaluation lacks metrics of the run's validation: {', '.join(missing)}",
            hint="leave out overrides of rollout.validation and data.val_files",
        )
    return [
        RunFigure(name=n, low=row[f"{n}/low"], high=row[f"{n}/high"], served=metrics[n])
        for n in names
    ]
