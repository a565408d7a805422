"""ServingRollout: a rollout replica on a serving engine: running samples, their interruption by weight updates, refused requests, sleep."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from dovetail.errors import ModelError, RequestRefusedError, RolloutError, WeightSyncError
from dovetail.interfaces import (
    BaseRollout,
    Completion,
    FinishReason,
    PauseMode,
    PluginConfig,
    PluginContext,
    RolloutRequest,
    SamplingParams,
    WeightManifest,
)
from dovetail.metrics import Metric
from dovetail_datasets import ModelFacts, refuse_missing_model
from dovetail_serving.adapter_check import refuse_adapter
from dovetail_serving.backend import Backend
from dovetail_serving.gate import Gate, RunningSample
from dovetail_serving.requests import (
    call_for,
    completion_of,
    cut_short,
    problem_of,
    with_ends,
)
from dovetail_serving.weight_state import WeightState

_AGAIN_SECONDS = 0.1
"""Seconds after which samples that have not returned are aborted again."""


class ServingRollout(BaseRollout):
    """Base of rollouts on one engine or server.

    Every sample is a separate request and arrives when it is finished; the engine's prefix cache shares the keys and values of a prompt.

    An update interrupts running samples, which afterwards continue from their tokens so far, so weights never change while a sample
    runs. The exception is a pause that keeps the KV cache (`KEEP_CACHE`): the engine then reports each token's weight version. Every
    token's version is therefore that of the weights that produced it. (A stop string across an interruption is not detected.)

    A subclass is the plugin, with a name, capabilities and a Config, and makes the `Backend`. The Config may have the fields
    `max_model_len` (maximum tokens of prompt and response together, or None), `max_adapter_rank` (largest adapter rank, or None) and
    `seeding` (`per_sample` or `none`). A missing `seeding` counts as `none`, any other missing field as None.
    """

    engine: ClassVar[str]
    """The engine's name in messages, such as `vLLM`."""
    log_probs: ClassVar[Literal["processed", "raw"]] = "processed"
    """The distribution of the backend's log-probabilities. `processed`: the distribution that the sampler used; `raw`: the full softmax of
    logits / temperature, before top-p and top-k. With `raw` and top-k, the backend returns the log-probabilities under both
    distributions.
    """

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._backend: Backend | None = None
        self._gate = Gate()
        self._frozen = False
        self._weight_state = WeightState()

    # -- implemented by plugins ----------------------------------------------------------------------

    @abstractmethod
    def make_backend(self) -> Backend:
        """Return a backend for the rollout's config and context, not yet started."""

    def starts_empty(self) -> bool:
        """Return whether the engine starts without weights, because a complete update precedes the first request; by default False."""
        return False

    # -- the interface ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine, or join a server.

        Raises:
            PluginNeedsError: the engine is missing, or its version is not supported.
            ModelError: there is no model, or the engine does not support it.
            ConfigError: the engine does not accept an argument.
            PlacementError: there is not enough memory.
            RolloutError: the engine did not start for another reason; has the engine's last output.
        """
        context = self.context
        if context.model is None:
            raise ModelError("the rollout was given no model", hint="set model.path in the config")
        backend = self.make_backend()
        refuse_missing_model(context.model.path)
        if self.starts_empty():
            self._weight_state.began_empty()
        length = getattr(self.config, "max_model_len", None)
        self._facts = ModelFacts.read(context.model, context.tokenizer, length)
        backend.start()
        self._backend = backend

    @property
    def version(self) -> int:
        """The current weight version; 0 is the model loaded from disk."""
        return self._weight_state.version

    @property
    def backend(self) -> Backend:
        """The running backend.

        Raises:
            RolloutError: the rollout is not running.
        """
        return self._running()

    async def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        self._refuse(request)
        prompt_ids = request.prompt_ids.tolist()
        sampling = with_ends(request.sampling, self._facts)
        tasks = [
            asyncio.create_task(self._sample(request, index, prompt_ids, sampling))
            for index in range(request.n)
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            # If the caller stops early or a sample fails, cancel the other samples.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._running().abort(self._gate.abort(request_ids))

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        running = self._gate.close(abort=mode is PauseMode.ABORT)
        if mode is PauseMode.KEEP_CACHE:
            await self._running().freeze()
            self._frozen = True
            return
        emptied = asyncio.wrap_future(self._gate.empty())
        while running and mode is not PauseMode.WAIT and not emptied.done():
            # Repeat the abort, since the engine may not have received a call yet.
            await self._running().abort(running)
            await asyncio.wait({emptied}, timeout=_AGAIN_SECONDS)
            running = self._gate.kept_out()
        # Without the shield, a cancelled caller would cancel the future, and `set_result` in `Gate.leave` would raise.
        await asyncio.shield(emptied)

    async def resume(self) -> None:
        if self._frozen:
            if not self._weight_state.fit:
                await self.pause(PauseMode.KEEP)  # incomplete weights: refuse frozen samples
            self._frozen = False
            await self._running().thaw()
        self._gate.open()

    async def reset_cache(self) -> None:
        await self._running().reset_cache()

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._weight_state.refuse_use("sequences can't be scored")
        return await self._running().score([ids.tolist() for ids in sequences])

    def check_manifest(self, version: int, manifest: WeightManifest) -> None:
        who = f"weight update {version}"
        if self.context.transport is None:
            raise WeightSyncError(
                f"{who} can't be received: the rollout has no weight transport",
                hint="set rollout.weight_transport",
            )
        if manifest.kind == "delta":
            raise WeightSyncError(
                f"{who} is of kind 'delta', which rollout {self.name!r} does not support",
                hint="send whole weights or an adapter",
            )
        if manifest.kind == "adapter":
            if "lora" not in self.capabilities:
                raise WeightSyncError(
                    f"{who} is an adapter, but rollout {self.name!r} does not support adapters",
                    hint="send merged weights (actor.engine.lora.sync: merged)",
                )
            refuse_adapter(version, manifest, room=self._adapter_room, who=self.engine)

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        """Receive weights as in `BaseRollout.receive_weights`.

        After an incomplete update, generation is refused until a later update is complete.
        """
        backend = self._running()
        self.check_manifest(version, manifest)
        self._weight_state.refuse_update(version, manifest)
        was_open = not self._gate.closed
        if not self._frozen or manifest.kind == "adapter":
            # Running calls would continue with the old adapter, so they must be interrupted even if frozen.
            self._interrupt(version)
        try:
            backend.load(version, manifest)
        except WeightSyncError as error:
            self._weight_state.broke_off(version, manifest, error)
            raise
        else:
            self._weight_state.updated(version, manifest)
        finally:
            if was_open:
                self._gate.open()

    def alive(self) -> bool:
        return self._backend is not None and self._backend.alive()

    @property
    def draining(self) -> bool:
        return self._backend is not None and self._backend.draining

    def metrics(self) -> Mapping[str, Metric]:
        return {} if self._backend is None else self._backend.metrics()

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        backend = self._running()
        if self._gate.running:
            raise RolloutError(
                "the rollout can't sleep while requests are running", hint="pause the rollout first"
            )
        # Updates with adapters do not contain the base weights, which must therefore be kept, even before the first update.
        keep = keep_weights or self._weight_state.adapted or self._adapter_room is not None
        freed = backend.sleep(tags - self._weight_state.asleep, keep_weights=keep)
        self._weight_state.slept(tags, kept_weights=keep)
        return freed

    def wake(self, tags: frozenset[str]) -> None:
        self._running().wake(tags & self._weight_state.asleep)
        self._weight_state.woke(tags)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    # -- one sample ----------------------------------------------------------------------------

    async def _sample(
        self, request: RolloutRequest, index: int, prompt_ids: list[int], sampling: SamplingParams
    ) -> Completion:
        """Generate a sample; continue it after each interruption."""
        sample = RunningSample(f"{request.request_id}/{index}", request.request_id)
        stream = request.streams[index]
        earlier: Completion | None = None
        while await self._gate.enter(sample):
            try:
                self._weight_state.refuse_use(f"request {request.request_id!r} can't be generated")
                version = self._weight_state.version
                call = call_for(
                    sample.call_id,
                    prompt_ids,
                    sampling,
                    stream,
                    earlier,
                    seeded=getattr(self.config, "seeding", "none") == "per_sample",
                    media=request.media,
                    priority=request.priority,
                )
                result = await self._running().generate(call)
            finally:
                self._gate.leave(sample)
            whole = completion_of(request, index, result, version, earlier)
            if whole.finish_reason is not FinishReason.ABORT or sample.aborted:
                return whole
            earlier = whole
        return cut_short(request, index, earlier)

    def _interrupt(self, version: int) -> None:
        """Interrupt all running samples before a weight update; they return their tokens so far.

        Raises:
            WeightSyncError: samples run, and the calling thread runs an event loop, which the wait for the samples would block.
        """
        running = self._gate.close()
        if not running:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self.pause(PauseMode.KEEP))
            return
        self._gate.open()
        raise WeightSyncError(
            f"weight update {version} can't run on this event loop: it would block all running samples ({len(running)})",
            hint="pause the rollout first, or call receive_weights in another thread",
        )

    # -- helpers ----------------------------------------------------------------------------

    @property
    def _adapter_room(self) -> int | None:
        return getattr(self.config, "max_adapter_rank", None)

    def _running(self) -> Backend:
        if self._backend is None:
            raise RolloutError("the rollout is not running", hint="call start() first")
        return self._backend

    def _refuse(self, request: RolloutRequest) -> None:
        """Refuse a request that can't be generated, before it reaches the engine."""
        self._running()
        what = f"request {request.request_id!r} can't be generated"
        self._weight_state.refuse_use(what)
        problem = problem_of(request, self._facts, engine=self.engine, log_probs=self.log_probs)
        if request.media and "images" not in self.capabilities:
            problem = f"its prompt has images ({len(request.media)}), but this {self.engine} rollout does not support images"
        if problem:
            raise RequestRefusedError(f"{what}: {problem}")
