"""EngineDriver: operates vLLM's asynchronous engine from the engine's event loop, in a replica or in a server."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail_datasets import takes_images
from dovetail_rollout_vllm.adapters import adapter_name
from dovetail_rollout_vllm.calls import SamplingTable, result_of, scores_of
from dovetail_rollout_vllm.pictures import VllmImagePrompts
from dovetail_rollout_vllm.versions import free_kv_cache, labels_tokens
from dovetail_serving import Outcome, SampleCall, SampleResult, merged_outcomes

_RESET_SECONDS = 30.0


class EngineDriver:
    """Operates an AsyncLLM of vLLM, which another component starts and stops.

    Args:
        engine: vLLM's AsyncLLM.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._table = SamplingTable()
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._scored = 0
        self._adapter: Any = None
        self._asleep: frozenset[str] = frozenset()
        self._along: frozenset[str] = frozenset()
        self._updating = asyncio.Lock()
        self._made_pictures: VllmImagePrompts | None = None
        self._frozen = False
        self._salt: str | None = None
        """Salt of cached prefixes, by which requests do not find prefixes of older weights."""
        self._records = False
        self._due: dict[str, tuple[int, asyncio.Future[str | None]]] = {}
        self._fetching: asyncio.Task[None] | None = None

    @property
    def running(self) -> Collection[str]:
        """The ids of the running requests."""
        return self._running

    @property
    def dead(self) -> bool:
        """Whether vLLM has noticed the death of its engine process."""
        return bool(self._engine.errored)

    async def record(self) -> None:
        """Make vLLM's workers keep a request's log-probabilities until the request ends; one call then fetches all of them.

        Call this only if the engine has no other clients, since outputs then lack the log-probabilities of sampled tokens.
        """
        self._records = any(await self._engine.collective_rpc("dovetail_record"))

    async def generate(self, call: SampleCall) -> SampleResult:
        """Generate one sample; cancelling the task aborts the request.

        Raises:
            RequestRefusedError: vLLM refuses the request.
            Exception: vLLM failed with this exception.
        """
        params = self._table.of(call.sampling, call.seed)
        if not call.media:
            made = await self._request(call.call_id, call.prompt_ids, params, call.priority)
            return await self._result(call, *made)
        pictures = self._pictures()
        # Image files are read and decoded in a thread, so that the event loop can serve other requests.
        prompt = await asyncio.to_thread(pictures.prompt, call)
        output, inside = await self._request(call.call_id, prompt, params, call.priority)
        pictures.check(call, output.prompt_token_ids)
        return await self._result(call, output, inside)

    async def abort(self, names: Sequence[str]) -> None:
        """Abort requests by name; their `generate` calls return the tokens so far."""
        here = [name for name in names if name in self._running]
        self._aborted.update(here)
        if here:
            await self._engine.abort(here)

    async def score(self, sequences: Sequence[list[int]]) -> list[np.ndarray]:
        """Return the log-probabilities of every token but the first of each sequence, float32 [L_i − 1], under the full softmax at
        temperature 1.
        """

        async def one(ids: list[int]) -> np.ndarray:
            self._scored += 1
            name = f"dovetail-score-{self._scored}"
            output, _ = await self._request(name, ids, self._table.scoring())
            return scores_of(output, len(ids))

        return list(await asyncio.gather(*map(one, sequences)))

    async def reset_cache(self) -> None:
        """Drop cached prefixes and encoded images; running requests recompute their prefixes and images.

        Raises:
            RolloutError: vLLM could not drop the cached prefixes.
        """
        if self._running:
            await self._engine.reset_prefix_cache(reset_running_requests=True)
        else:
            await self._forget_prefixes()
        # vLLM caches encoded images by digest, without regard to the weights that encoded them.
        await self._engine.reset_encoder_cache()

    async def _forget_prefixes(self) -> None:
        deadline = time.monotonic() + _RESET_SECONDS
        # A request that has just ended keeps its blocks until the running step is over.
        while not await self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"vLLM did not clear its prefix cache within {_RESET_SECONDS:g} s, though no request is running: the "
                    "cache may still hold keys and values of old weights"
                )
            await asyncio.sleep(0.01)

    async def connect(self, info: dict[str, Any]) -> Outcome:
        """Make every worker create its receiver of weights.

        Args:
            info: the result of `dovetail_serving.weight_wire.transport_info`.
        """
        return await self._everywhere("dovetail_connect", info, version=0)

    async def parts(self) -> dict[str, list[str]]:
        """Return the names of the model's fused layers and of the fused tensors, as `fused.parts_of` does."""
        found: dict[str, list[str]] = {}
        for text in await self._engine.collective_rpc("dovetail_parts"):
            found |= json.loads(text)
        return found

    async def settle(self) -> None:
        """Reset the engine after an earlier run: wake it, resume generation, and stop using an adapter."""
        self._adapter = self._salt = None
        await self.wake(self._asleep)
        if await self._engine.is_paused():
            await self.thaw()
        await self.reset_cache()
        await self._label(0)

    async def load(self, manifest: dict[str, Any]) -> Outcome:
        """Make every worker receive, verify and load a weight update, and stop reuse of prefixes that earlier weights computed.

        The cached prefixes are dropped. If frozen requests still need their KV cache, new requests get another cache salt instead.

        Args:
            manifest: the result of `dovetail_serving.weight_wire.manifest_info`.
        """
        version = int(manifest["version"])
        outcome = await self._everywhere("dovetail_receive", manifest, version=version)
        if outcome.error is None:
            self._adapter = _adapter(version, outcome.adapter)
            await self._label(version)
            if self._frozen and self._running:
                self._salt = str(version)
            else:
                await self.reset_cache()
        return outcome

    async def freeze(self) -> None:
        """Pause all requests until `thaw`, and keep their KV cache.

        Raises:
            RolloutError: this vLLM version does not record the weight version of tokens.
        """
        if not labels_tokens(self._engine):
            raise RolloutError(
                "this version of vLLM does not report which weights produced a token: set rollout.keep_cache=false, or install a newer vLLM"
            )
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        self._frozen = True

    async def thaw(self) -> None:
        """Continue the paused requests."""
        self._frozen = False
        await self._engine.resume_generation()

    async def _label(self, version: int) -> None:
        """Set the weight version with which vLLM labels tokens from now on, if this vLLM labels tokens."""
        if labels_tokens(self._engine):
            await self._engine.update_weight_version(str(version))

    async def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        """Free the accelerator memory of the tags, and return the number of freed bytes.

        Args:
            tags: the memory to free: `weights`, `kv_cache` or both.
            keep_weights: whether vLLM keeps a copy of the weights in host memory; otherwise they must be sent again.
        """
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            return 0
        before = await self._free_bytes()
        apart = self._asleep
        if "weights" in tags - apart:
            # vLLM frees weights only together with the KV cache, and neither if one of them is already asleep.
            if apart:
                await self._engine.wake_up(sorted(apart, reverse=True))
            self._along = frozenset({"kv_cache"}) - tags - apart
            await self._engine.sleep(level=1 if keep_weights else 2)
            self._asleep = tags | apart | self._along
        elif tags <= apart:
            self._along -= tags
        elif await free_kv_cache(self._engine):
            self._along = frozenset()
            self._asleep |= tags
        return max(await self._free_bytes() - before, 0)

    async def wake(self, tags: frozenset[str]) -> None:
        """Allocate the memory of the tags (`weights`, `kv_cache`) again.

        vLLM frees weights only together with the KV cache. If `sleep` freed the KV cache only for this reason, waking the weights
        allocates the KV cache again, too.
        """
        due = self._asleep & (tags | self._along if "weights" in tags else tags)
        if due:
            await self._engine.wake_up(sorted(due, reverse=True))
            self._asleep -= due

    def _pictures(self) -> VllmImagePrompts:
        """Return the builder of prompts with images, made on first use.

        Raises:
            RequestRefusedError: the model takes no images.
        """
        if self._made_pictures is None:
            config = self._engine.vllm_config.model_config.hf_config
            if not takes_images(config):
                raise RequestRefusedError(
                    f"a prompt has images, but the model ({type(config).__name__}) accepts none",
                    hint="set model.path to a vision-language model, or leave the rows with images out",
                )
            self._made_pictures = VllmImagePrompts(config)
        return self._made_pictures

    async def _request(
        self,
        name: str,
        prompt: Sequence[int] | Mapping[str, Any],
        params: object,
        priority: int = 0,
    ) -> tuple[Any, str]:
        """Run one request; return vLLM's final output and its internal name of the request.

        The prompt is token ids, or a mapping with images, which vLLM processes.
        """
        from vllm.inputs import tokens_input

        engine, queue = self._engine, None
        if name in self._running:
            raise RolloutError(
                f"two running calls have the id {name!r}; give every call an id of its own"
            )
        self._running.add(name)
        try:
            given = dict(prompt) if isinstance(prompt, Mapping) else tokens_input(list(prompt))
            if self._salt is not None:
                given["cache_salt"] = self._salt
            queue = await engine.add_request(
                name, given, params, lora_request=self._adapter, priority=priority
            )
            if name in self._aborted:
                # The abort came while the request was being added.
                await engine.abort(name)
            while True:
                output = queue.get_nowait() or await queue.get()
                if output.finished:
                    return output, str(queue.request_id)
        except asyncio.CancelledError:
            if queue is not None:
                await engine.abort(name)
            raise
        except ValueError as error:
            raise RequestRefusedError(f"vLLM refuses request {name!r}: {error}") from error
        finally:
            self._running.discard(name)
            self._aborted.discard(name)
            if queue is not None:
                queue.close()

    async def _result(self, call: SampleCall, output: Any, inside: str) -> SampleResult:
        """Return a request's result, with the log-probabilities that the workers recorded.

        Args:
            call: the call that asked for the sample.
            output: vLLM's RequestOutput of the request.
            inside: vLLM's internal name of the request, under which the workers recorded.

        Raises:
            RolloutError: a log-probability is missing.
        """
        wanted = call.sampling.log_probs or call.sampling.raw_log_probs
        tokens = len(output.outputs[0].token_ids)
        if not (self._records and wanted and tokens):
            return result_of(output)
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._due[inside] = (tokens, future)
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch())
        kept = np.frombuffer(base64.b64decode(await future or ""), np.float32).copy()
        if len(kept) != tokens or np.isnan(kept).any():
            raise RolloutError(
                f"vLLM's workers did not record the log-probabilities of all {tokens} tokens of request {call.call_id!r}"
            )
        return result_of(output, kept)

    async def _fetch(self) -> None:
        """Fetch the log-probabilities of finished requests; requests that finish during a fetch share the next one."""
        while due := self._due:
            self._due = {}
            lengths = json.dumps({name: tokens for name, (tokens, _) in due.items()})
            found: dict[str, str] = {}
            try:
                answers = await self._engine.collective_rpc("dovetail_log_probs", args=(lengths,))
                for answer in map(json.loads, answers):
                    found |= {name: kept for name, kept in answer.items() if kept is not None}
            except Exception as error:  # noqa: BLE001 - raised where each is waited for
                for _, future in due.values():
                    if not future.done():
                        future.set_exception(error)
                continue
            for name, (_, future) in due.items():
                if not future.done():
                    future.set_result(found.get(name))

    async def _everywhere(self, method: str, info: dict[str, Any], *, version: int) -> Outcome:
        """Call a method of `WorkerMethods` in every worker, and merge the workers' outcomes; one call at a time.

        Args:
            method: the name of the method.
            info: the method's argument, which is sent as JSON.
            version: the weight version of the update, for error messages.
        """
        async with self._updating:
            outcomes = await self._engine.collective_rpc(method, args=(json.dumps(info),))
        return merged_outcomes(outcomes, version)

    async def _free_bytes(self) -> int:
        return sum(await self._engine.collective_rpc("dovetail_free_bytes"))


def _adapter(version: int, number: int | None) -> Any:
    if number is None:
        return None
    from vllm.lora.request import LoRARequest

    name = adapter_name(version)
    return LoRARequest(name, number, f"received/{name}")
