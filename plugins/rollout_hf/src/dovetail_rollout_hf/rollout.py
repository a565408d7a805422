"""HfRollout: a rollout engine that runs a transformers model in this process."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.errors import ModelError, RequestRefusedError, RolloutError, WeightSyncError
from dovetail.interfaces import (
    BaseRollout,
    Completion,
    PauseMode,
    PluginContext,
    RolloutRequest,
    WeightManifest,
)
from dovetail.metrics import Metric
from dovetail.workers import turn
from dovetail_datasets import ImageInputs, max_positions
from dovetail_rollout_hf.choice import choose_decoder
from dovetail_rollout_hf.config import HfRolloutConfig
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.model import load_model, load_tokenizer
from dovetail_rollout_hf.scheduler import Scheduler
from dovetail_rollout_hf.scoring import refuse_to_score, score_tokens
from dovetail_rollout_hf.stops import StopRules, eos_token_ids
from dovetail_rollout_hf.tickets import Ticket
from dovetail_rollout_hf.weights import copy_weights, refuse_misfits
from dovetail_rollouts import received_whole


class HfRollout(BaseRollout):
    """Rollout engine on a transformers model, with one decode thread in this process.

    Each prompt is prefilled once for all its samples. A sample's tokens depend only on its seed and the weights, not on other
    samples of the batch, except for the rounding of matrix products.
    """

    name = "hf"
    api = ">=1.0,<2"
    capabilities = frozenset(
        {
            "logprobs",
            "raw_logprobs",
            "per_sample_seed",
            "deterministic",
            "scores",
            "keeps_cache",
            "sleep",
            "images",
        }
    )
    Config = HfRolloutConfig

    def __init__(self, config: HfRolloutConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._model: Any = None
        self._scheduler: Scheduler | None = None
        self._receiver: Any = None
        self._asleep = False

    def start(self) -> None:
        """Load the model, choose and test its decoder, and start the decode thread.

        Raises:
            ModelError: the model can't be loaded, or the configured decoder fails its test.
        """
        context = self.context
        if context.model is None:
            raise ModelError("the rollout was given no model", hint="set model.path in the config")
        self._device = torch.device(context.device)
        self._model = load_model(context.model, context.device)
        tokenizer = (
            context.tokenizer if context.tokenizer is not None else load_tokenizer(context.model)
        )
        self._stops = StopRules(tokenizer, eos_token_ids(self._model, tokenizer))
        self._decoder = choose_decoder(self._model, self.config.decoder, context.logger)
        config = self._model.config.get_text_config()
        self._vocab_size = int(config.vocab_size)
        self._max_positions = max_positions(config)
        self._scheduler = Scheduler(
            self._decoder,
            self._device,
            max_batch_size=self.config.max_batch_size,
            max_prefill_tokens=self.config.max_prefill_tokens,
        )
        if context.transport is not None:
            # From here on, weight updates also wait for this replica.
            self._receiver = context.transport.receiver()

    @property
    def decoder(self) -> Decoder:
        """The decoder that runs the model."""
        return self._decoder

    @property
    def version(self) -> int:
        """The current weight version; 0 for the model loaded from disk."""
        return self._running().version

    async def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        scheduler = self._running()
        self._refuse(request)
        self._ready_for_images(request)
        ticket = Ticket(
            request,
            self._stops.of(request.sampling),
            asyncio.get_running_loop(),
            asyncio.Queue(),
            deque(range(request.n)),
            request.n,
        )
        if request.n == 0:
            return
        scheduler.hand_over(ticket)
        received = 0
        failed = False
        try:
            while received < request.n:
                item = await ticket.inbox.get()
                if isinstance(item, RolloutError):
                    failed = True
                    raise item
                received += 1
                yield item
        finally:
            # If the caller stops early, the samples that still run are aborted.
            if received < request.n and not failed:
                scheduler.call(lambda: scheduler.abort([request.request_id]))

    async def abort(self, request_ids: Sequence[str]) -> None:
        scheduler, names = self._running(), tuple(request_ids)
        await asyncio.wrap_future(scheduler.call(lambda: scheduler.abort(names)))

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        scheduler = self._running()
        done = await asyncio.wrap_future(scheduler.call(lambda: scheduler.pause(mode)))
        await asyncio.wrap_future(done)

    async def resume(self) -> None:
        scheduler = self._running()
        await asyncio.wrap_future(scheduler.call(scheduler.resume))

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        self._running()
        refuse_misfits(self._model, manifest)

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        scheduler = self._running()
        if self._receiver is None:
            raise WeightSyncError(
                f"weight update {version} can't be received: the rollout has no weight transport",
                hint="set rollout.weight_transport",
            )
        if self._asleep:
            raise WeightSyncError(
                f"weight update {version} can't be received while the weights are asleep",
                hint="wake the weights first",
            )
        refuse_misfits(self._model, manifest)
        # The whole update is received before the first copy, so that a broken update changes nothing.
        with turn():
            staged = received_whole(self._receiver, manifest)

        def commit() -> None:
            copy_weights(self._model, staged)
            scheduler.set_version(version)

        scheduler.call(commit).result()

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities, float32 [L − 1] each, of given sequences, int64 [L] each, computed between two decoding steps."""
        scheduler, vocab_size = self._running(), self._vocab_size
        refuse_to_score(sequences, vocab_size=vocab_size, max_positions=self._max_positions)
        if self._asleep:
            raise RolloutError(
                "sequences can't be scored while the weights are asleep",
                hint="wake the weights first",
            )
        job = scheduler.call(lambda: score_tokens(self._model, sequences, vocab_size))
        return await asyncio.wrap_future(job)

    def metrics(self) -> Mapping[str, Metric]:
        """Return the numbers of generated and prefilled tokens, and the batch's utilisation, since the last call."""
        if self._scheduler is None:
            return {}
        return self._scheduler.call(self._scheduler.take_counts).result().metrics()

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        scheduler = self._running()

        def work() -> int:
            if not scheduler.idle:
                raise RolloutError(
                    "the rollout can't sleep: requests are running", hint="pause the rollout first"
                )
            freed = scheduler.release() if "kv_cache" in tags else 0
            if "weights" in tags and not self._asleep and self._device.type != "cpu":
                before = _allocated(self._device)
                self._place(torch.device("cpu"))
                self._asleep = True
                freed += before - _allocated(self._device)
            return freed

        return scheduler.call(work).result()

    def wake(self, tags: frozenset[str]) -> None:
        scheduler = self._running()

        def work() -> None:
            if "weights" in tags and self._asleep:
                self._place(self._device)
                self._asleep = False

        scheduler.call(work).result()

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._model = None

    def _place(self, device: torch.device) -> None:
        self._model.to(device)
        self._decoder.moved()
        gc.collect()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()

    def _running(self) -> Scheduler:
        if self._scheduler is None:
            raise RolloutError("the rollout is not running", hint="call `start` first")
        return self._scheduler

    def _ready_for_images(self, request: RolloutRequest) -> None:
        """Give the decoder its converter of images at the first request with images, and check that the prompt has image tokens.

        Raises:
            ModelError: the model takes no images.
            RequestRefusedError: the request has images, but its prompt has no token that stands for an image.
        """
        if not request.media:
            return
        if self._decoder.images is None and self.context.model is not None:
            self._decoder.images = ImageInputs(self._model, self.context.model)
        images = self._decoder.images
        if images is not None and not (request.prompt_ids == images.image_token).any():
            raise RequestRefusedError(
                f"request {request.request_id!r} has {len(request.media)} images, but its prompt lacks the "
                f"image token {images.image_token}",
                hint="expand the prompt with the model's own processor",
            )

    def _refuse(self, request: RolloutRequest) -> None:
        """Raise an error for a request that can't be generated, before the request reaches the model."""
        sampling, ids_P = request.sampling, request.prompt_ids
        what = f"request {request.request_id!r} can't be generated"
        if self._asleep:
            raise RolloutError(
                f"{what} while the weights are asleep", hint="wake the weights first"
            )
        problem = None
        if len(ids_P) == 0:
            problem = "its prompt is empty"
        elif ids_P.min() < 0 or ids_P.max() >= self._vocab_size:
            problem = f"its prompt holds token ids outside 0 … {self._vocab_size - 1}"
        elif sampling.max_new_tokens < 1:
            problem = f"max_new_tokens is {sampling.max_new_tokens}; expected 1 or more"
        elif sampling.temperature < 0:
            problem = f"temperature is {sampling.temperature}; expected 0 (greedy) or more"
        elif not 0 < sampling.top_p <= 1:
            problem = f"top_p is {sampling.top_p}; expected more than 0 and at most 1"
        elif self._max_positions and len(ids_P) + sampling.max_new_tokens > self._max_positions:
            problem = (
                f"its {len(ids_P)} prompt tokens and {sampling.max_new_tokens} new tokens exceed the model's "
                f"{self._max_positions} positions"
            )
        if problem:
            raise RequestRefusedError(f"{what}: {problem}")


def _allocated(device: torch.device) -> int:
    """Return the bytes of live tensors on an accelerator."""
    return int(torch.get_device_module(device).memory_allocated(device))
