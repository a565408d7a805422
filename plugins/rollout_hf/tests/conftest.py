"""A tiny model on disk, and a running engine with the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.interfaces import Completion, PluginContext, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection
from dovetail_rollout_hf.config import HfRolloutConfig
from dovetail_rollout_hf.rollout import HfRollout
from dovetail_sdk.testing.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # The tensors are tiny: more threads would only wait for each other.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer(directory, vocab_size=300)
    model = tiny_model(directory, tokenizer, hidden_size=32, intermediate_size=48)
    with torch.no_grad():
        # Random weights of the usual size give almost uniform predictions; larger weights give distinct ones.
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=torch.manual_seed(5)))
    model.save_pretrained(str(directory))
    return directory


@pytest.fixture
def start(model_directory: Path) -> Iterator[Callable[..., HfRollout]]:
    """Start engines on the tiny model; they are closed at the end of the test."""
    running = []

    def make(transport: Any = None, path: Path = model_directory, **config: Any) -> HfRollout:
        section = ModelSection(path=str(path), dtype="float32")
        context = PluginContext(model=section, transport=transport)
        rollout = HfRollout(HfRolloutConfig(**config), context)
        running.append(rollout)
        rollout.start()
        return rollout

    yield make
    for rollout in running:
        rollout.close()


@pytest.fixture(scope="session")
def request_of() -> Callable[..., RolloutRequest]:
    """Make a request: `request_of(prompt, n, epoch=…, offset=…, **sampling)`."""

    def make(
        prompt: int = 0,
        n: int = 2,
        *,
        length: int = 6,
        epoch: int = 0,
        offset: int = 0,
        **sampling: Any,
    ) -> RolloutRequest:
        rng = np.random.default_rng(prompt)
        sampling = {"max_new_tokens": 8, "ignore_eos": True} | sampling
        return RolloutRequest(
            request_id=f"p{prompt}.e{epoch}",
            prompt_ids=rng.integers(5, 299, length),
            sampling=SamplingParams(**sampling),
            streams=tuple(
                SampleStream(seed=3, epoch=epoch, prompt=prompt, sample=i, offset=offset)
                for i in range(n)
            ),
        )

    return make


@pytest.fixture(scope="session")
def generate() -> Callable[..., dict[tuple[str, int], Any]]:
    """Generate requests at once; returns completions by (request id, sample)."""

    def run(rollout: HfRollout, *requests: RolloutRequest) -> dict[tuple[str, int], Any]:
        async def one(request: RolloutRequest) -> list[Any]:
            return [completion async for completion in rollout.submit(request)]

        async def every() -> list[list[Any]]:
            return await asyncio.gather(*(one(request) for request in requests))

        found = [completion for group in asyncio.run(every()) for completion in group]
        return {(completion.request_id, completion.sample): completion for completion in found}

    return run


@pytest.fixture(scope="session")
def log_probs_of() -> Callable[..., np.ndarray]:
    """Full-softmax log-probabilities [T] of a completion, by one plain forward pass."""

    def run(model: Any, request: RolloutRequest, completion: Completion) -> np.ndarray:
        ids = torch.tensor([*request.prompt_ids.tolist(), *completion.response_ids.tolist()])
        with torch.inference_mode():
            logits = model(ids[None]).logits[0].double() / (request.sampling.temperature or 1.0)
        start = len(request.prompt_ids) - 1
        chosen = logits[start:-1].log_softmax(-1)
        return np.asarray(chosen.gather(1, ids[start + 1 :, None])[:, 0].numpy())

    return run


@pytest.fixture(scope="session")
def until_running() -> Callable[..., Awaitable[None]]:
    """Wait until so many samples run: what acts earlier finds them waiting on a machine that is busy."""

    async def wait(rollout: HfRollout, samples: int = 1) -> None:
        scheduler = rollout._scheduler
        while scheduler is None or scheduler._batch.active < samples:
            await asyncio.sleep(0.001)

    return wait


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., threading.Event]:
    """Let a step take 2 ms at least, so that a test can act while a request runs.

    With `hold_after`, later steps wait until the event that it gives is set.
    """

    def patch(rollout: HfRollout, hold_after: int | None = None) -> threading.Event:
        step, steps, go_on = rollout.decoder.step, 0, threading.Event()

        def slowly(*arguments: Any) -> torch.Tensor:
            nonlocal steps
            time.sleep(0.002)
            steps += 1
            if hold_after is not None and steps > hold_after:
                go_on.wait(240)
            return step(*arguments)

        monkeypatch.setattr(rollout.decoder, "step", slowly)
        return go_on

    return patch
