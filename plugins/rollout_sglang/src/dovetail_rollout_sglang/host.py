"""SglangHost: handlers of an SGLang server's Dovetail routes, on the same tokenizer manager as SGLang's routes."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail_rollout_sglang.calls import likeliest, result_of, sampling_of, scores_of, scoring
from dovetail_rollout_sglang.hooks import LOAD_FORMAT
from dovetail_rollout_sglang.prefixes import Prefixes
from dovetail_rollout_sglang.server_metrics import SglangCounters
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_serving import PROTOCOL, Frame, Host, Outcome, SampleCall, SampleResult, shape_of

_logger = logging.getLogger(__name__)
_FLUSH_SECONDS = 30.0
_AGAIN_SECONDS = 0.05


class SglangHost(Host):
    """Handlers of requests to the engine of one SGLang server.

    Args:
        manager: SGLang's TokenizerManager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._counters = SglangCounters()
        self._names: dict[str, str] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._scored = 0
        self._asleep: frozenset[str] = frozenset()
        self._updating = asyncio.Lock()
        self._adapter: str | None = None
        """SGLang's name of the adapter that requests use; None without an adapter."""
        self._replaced: dict[str, Any] | None = None
        """Version, completeness and time of the weights that replaced the server's initial ones; None before."""
        self._numbers = itertools.count(1)
        self._prefixes = Prefixes(self._prime)

    async def describe(self, _: Frame) -> Frame:
        model, args = self._manager.model_config, self._manager.server_args
        text = getattr(model, "hf_text_config", None) or model.hf_config
        release = SGLANG.installed()
        return Frame(
            header={
                "protocol": PROTOCOL,
                "sglang": None if release is None else release.version,
                "model": model.model_path,
                "architectures": list(model.hf_config.architectures or ()),
                "shape": shape_of(text),
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": model.context_len,
                "quantization": args.quantization,
                "sleep": bool(args.enable_memory_saver),
                "seeds": bool(args.enable_deterministic_inference),
                "adapter_rank": args.max_lora_rank if args.enable_lora else None,
                "tokenizer": not args.skip_tokenizer_init,
                "ranks": args.tp_size,
                "stages": args.pp_size,
                "replaced": self._replaced,
                "copies": 1 if args.enable_dp_attention else args.dp_size,
            }
        )

    async def generate(self, call: SampleCall) -> SampleResult:
        """Generate one sample; cancelling the task aborts the request.

        Raises:
            RequestRefusedError: SGLang refuses the request.
        """
        # SGLang aborts every request whose name begins with the given one; the final dot keeps a name from being another's prefix.
        name = f"{call.call_id}."
        if call.call_id in self._names:
            raise RolloutError(
                f"two running calls have the id {call.call_id!r}; give every call an id of its own"
            )
        args = self._manager.server_args
        if call.sampling.stop and args.skip_tokenizer_init:
            raise RequestRefusedError(
                "a request has stop strings, which need a tokenizer, but this server was started with skip_tokenizer_init"
            )
        log_probs = call.sampling.log_probs or call.sampling.raw_log_probs
        self._names[call.call_id] = name
        try:
            with self._counters.running():
                # With data-parallel attention, each copy has its own cache, and it is unknown which one will compute a sample.
                if not args.disable_radix_cache and args.dp_size == 1:
                    await self._prefixes.shared(call.prompt_ids, call.priority)
                answer = await self._request(
                    name,
                    call.prompt_ids,
                    sampling_of(call),
                    priority=call.priority,
                    return_logprob=log_probs,
                    # -1: no log-probabilities of the prompt.
                    logprob_start_len=-1,
                    top_logprobs_num=likeliest(call, self._manager.model_config.vocab_size),
                )
            result = result_of(answer, log_probs=log_probs, top_p=call.sampling.top_p)
            self._counters.note(answer["meta_info"], len(result.response_ids))
            return result
        finally:
            self._names.pop(call.call_id, None)
            if call.call_id in self._ending:
                self._ending.pop(call.call_id).cancel()

    async def abort(self, frame: Frame) -> Frame:
        for call_id in frame.header["calls"]:
            if call_id in self._names and call_id not in self._ending:
                self._ending[call_id] = asyncio.create_task(self._end(self._names[call_id]))
        return Frame(header={})

    async def score(self, frame: Frame) -> Frame:
        async def one(ids: list[int]) -> Any:
            self._scored += 1
            answer = await self._request(
                f"dovetail-score-{self._scored}.",
                ids,
                scoring(),
                return_logprob=True,
                logprob_start_len=0,
            )
            return scores_of(answer, len(ids))

        scores = await asyncio.gather(*(one(array.tolist()) for array in frame.arrays))
        return Frame(header={}, arrays=tuple(scores))

    async def reset_cache(self, _: Frame) -> Frame:
        deadline = time.monotonic() + _FLUSH_SECONDS
        # A request that has just ended keeps its memory until the running step is over.
        while not (await self._manager.flush_cache()).success:
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"SGLang did not clear its prefix cache within {_FLUSH_SECONDS:g} s: it may still hold keys and values of old weights"
                )
            await asyncio.sleep(0.01)
        return Frame(header={})

    async def connect(self, frame: Frame) -> Frame:
        """Reset the engine for a new run, and make schedulers create receivers for the transport in `info` of the frame's header."""
        await self.wake(Frame(header={"tags": sorted(self._asleep)}))
        self._adapter = None
        # Garbage collection then skips objects that live as long as the server.
        await self._manager.freeze_gc()
        said = await self._command({"do": "connect", "info": frame.header["info"]})
        return Frame(header=_outcome(said))

    async def load(self, frame: Frame) -> Frame:
        manifest = frame.header["manifest"]
        version = int(manifest["version"])
        adapter = None
        if manifest["kind"] == "adapter":
            adapter = f"dovetail-{version}.{next(self._numbers)}"
        async with self._updating:
            command = {"manifest": manifest, "adapter": adapter, "in_force": self._adapter}
            said = await self._command({"do": "load", **command})
            if adapter is None and said["changed"]:
                self._note_replaced(version, whole=said["error"] is None)
            if said["error"] is None:
                self._adapter = adapter
                await self.reset_cache(frame)
            elif f"update {version}" not in said["error"]:
                said = {**said, "error": f"weight update {version} failed: {said['error']}"}
        if said["error"] is not None:
            _logger.warning("Weights of update %d were not loaded: %s", version, said["error"])
        return Frame(header=_outcome(said))

    async def sleep(self, frame: Frame) -> Frame:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        args, tags = self._manager.server_args, frozenset(frame.header["tags"])
        if not args.enable_memory_saver:
            return Frame(header={"freed": 0})
        if frame.header["keep_weights"] and not args.enable_weights_cpu_backup:
            tags -= {"weights"}  # without a backup they would be lost
        due = tags - self._asleep
        if not due:
            return Frame(header={"freed": 0})
        await self.reset_cache(frame)  # waits until no request runs
        before = await self._free_bytes()
        await self._manager.release_memory_occupation(
            ReleaseMemoryOccupationReqInput(tags=sorted(due))
        )
        self._asleep |= due
        if "weights" in due and not frame.header["keep_weights"]:
            self._note_replaced(None, whole=False)
        return Frame(header={"freed": max(await self._free_bytes() - before, 0)})

    async def wake(self, frame: Frame) -> Frame:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        due = frozenset(frame.header["tags"]) & self._asleep
        if due:
            request = ResumeMemoryOccupationReqInput(tags=sorted(due, reverse=True))
            await self._manager.resume_memory_occupation(request)
            self._asleep -= due
        return Frame(header={})

    async def metrics(self, _: Frame) -> Frame:
        return Frame(header=self._counters.totals())

    def _note_replaced(self, version: int | None, *, whole: bool) -> None:
        self._replaced = {"version": version, "whole": whole, "since": time.time()}

    # -- the pieces -------------------------------------------------------------------------------

    async def _request(
        self, name: str, ids: Any, sampling: dict[str, Any], **options: Any
    ) -> dict[str, Any]:
        """Generate with SGLang, and return its final answer, which has the form of a response of SGLang's `/generate`."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            rid=name,
            input_ids=list(ids),
            sampling_params=sampling,
            stream=False,
            # The adapter's name in the schedulers, which loaded it themselves: it is not in SGLang's own registry.
            lora_id=self._adapter,
            **options,
        )
        answers = self._manager.generate_request(request)
        try:
            found: dict[str, Any] = await anext(answers)
        except asyncio.CancelledError:
            self._manager.abort_request(rid=name)
            raise
        except ValueError as error:
            raise RequestRefusedError(f"SGLang refuses request {name!r}: {error}") from error
        finally:
            await answers.aclose()
        return found

    async def _prime(self, prompt_ids: Sequence[int], priority: int) -> None:
        """Make SGLang compute and cache the keys and values of a prompt before its samples."""
        name = f"dovetail-prompt-{next(self._numbers)}."
        try:
            await self._request(name, prompt_ids, scoring(), priority=priority)
        except RolloutError:
            return  # each sample's own request will fail

    async def _end(self, name: str) -> None:
        """Abort a request repeatedly until it ends: a scheduler forgets the abort of a request that it has not received yet."""
        while True:
            state = self._manager.rid_to_state.get(name)
            if getattr(state, "dispatched", True):
                self._manager.abort_request(rid=name)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command of Dovetail to the schedulers as a weight update, and return their answer."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[json.dumps(command).encode()],
            load_format=LOAD_FORMAT,
            flush_cache=False,
        )
        success, said = await self._manager.update_weights_from_tensor(request, None)
        if not success:
            raise RolloutError(f"SGLang failed to carry out the command {command['do']!r}: {said}")
        # With data-parallel attention, the schedulers' equal answers are concatenated: take the first.
        return json.JSONDecoder().raw_decode(said)[0]

    async def _free_bytes(self) -> int:
        return int((await self._command({"do": "free_bytes"}))["free_bytes"])


def _outcome(said: dict[str, Any]) -> dict[str, Any]:
    """Return those entries of a scheduler's answer that are fields of `Outcome`."""
    import attrs

    names = {field.name for field in attrs.fields(Outcome)}
    return {name: value for name, value in said.items() if name in names}
