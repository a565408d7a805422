"""The stand-in's engine: requests, each decoded by a task of its own, a token a turn."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import torch

from tensorrt_llm.executor.result import GenerationResult, Logprob
from tensorrt_llm.sampling_params import LogprobMode, SamplingParams


class RequestOutput(GenerationResult):
    """A request and its end."""


class LLM:
    """Decodes with the model of the first worker."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.workers: list[Any] = []
        self.generator = torch.Generator().manual_seed(42)
        self.tokenizer: Any = None

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Start a request."""
        params = sampling_params or SamplingParams()
        if params.end_id is None:
            params._setup(self.tokenizer, None, None)
        longest = self.args.max_input_len
        if len(inputs) > longest:
            raise ValueError(f"the prompt has {len(inputs)} tokens, max_input_len is {longest}")
        if len(inputs) + params.max_tokens > (self.args.max_seq_len or 1 << 30):
            raise ValueError("prompt and response exceed max_seq_len")
        request = RequestOutput()
        request.start(self._decode(request, list(inputs), params, cache_salt, streaming))
        return request

    def shutdown(self) -> None:
        """Nothing runs that would have to be ended."""

    async def _decode(
        self,
        request: RequestOutput,
        prompt: list[int],
        params: SamplingParams,
        salt: str | None,
        streaming: bool,
    ) -> None:
        params.stop_words()
        executor = self.workers[0].engine
        output = request.outputs[0]
        async with executor.running():
            cache, logits_V = self._read(request, prompt, params, (salt, tuple(prompt)))
            while output.finish_reason is None:
                if request.aborted:
                    output.finish_reason = "cancelled"
                    return
                token, log_prob = _draw(logits_V, params, self.generator)
                output.token_ids.append(token)
                if params.logprobs is not None:
                    output.logprobs.append({token: Logprob(log_prob, 1)})
                self._end(output, params, streaming)
                if output.finish_reason is None:
                    told = executor.step(torch.tensor([[token]]), cache)
                    cache, logits_V = told.past_key_values, told.logits[0, -1]
                await asyncio.sleep(0)

    def _read(
        self, request: RequestOutput, prompt: list[int], params: SamplingParams, key: Any
    ) -> tuple[Any, torch.Tensor]:
        """Keys and values of a prompt: computed, or those that are known."""
        executor = self.workers[0].engine
        reuse = self.args.kv_cache_config.enable_block_reuse
        if reuse and key in executor.prefixes:
            cache, logits_V = executor.prefixes[key]
            request.context_logits = logits_V[None]
            return copy.deepcopy(cache), logits_V
        told = executor.step(torch.tensor([prompt]), None)
        if params.return_context_logits:
            request.context_logits = told.logits[0]
        found = told.past_key_values, told.logits[0, -1].clone()
        if reuse:
            executor.prefixes[key] = (copy.deepcopy(found[0]), found[1])
        return found

    def _end(self, output: Any, params: SamplingParams, streaming: bool) -> None:
        """Whether the last token ends the sample, and whether it is part of it.

        Stop strings are known by their own tokens; by the text, however that came about, only where it is streamed.
        """
        token = output.token_ids[-1]
        stopped = any(output.token_ids[-len(word) :] == word for word in params.stop_words())
        if streaming and params.stop and not stopped:
            text = self.tokenizer.decode(output.token_ids)
            stopped = any(string in text for string in params.stop)
        if token == params.end_id or stopped:
            output.finish_reason = "stop"
            if token == params.end_id or not params.include_stop_str_in_output:
                del output.token_ids[-1], output.logprobs[-1:]
        elif len(output.token_ids) == params.max_tokens:
            output.finish_reason = "length"


def _draw(
    logits_V: torch.Tensor, params: SamplingParams, generator: torch.Generator
) -> tuple[int, float]:
    """A token and its log-probability, as the PyTorch sampler has them."""
    logits_V = logits_V.float()
    greedy = params.temperature == 0 or params.top_k == 1
    if greedy or (params.temperature is params.top_p is params.top_k is None):
        token = int(logits_V.argmax())
        raw = float(logits_V.log_softmax(-1)[token])
        return token, 0.0 if params.logprobs_mode is LogprobMode.PROCESSED else raw
    processed_V = logits_V / (params.temperature or 1.0)
    if params.top_k:
        least = processed_V.topk(min(params.top_k, len(processed_V))).values[-1]
        processed_V = processed_V.masked_fill(processed_V < least, -torch.inf)
    if params.top_p is not None and params.top_p < 1:
        sorted_V, order_V = processed_V.sort(descending=True)
        before_V = sorted_V.softmax(-1).cumsum(-1) - sorted_V.softmax(-1)
        processed_V = processed_V.index_fill(0, order_V[before_V >= params.top_p], -torch.inf)
    log_probs_V = processed_V.log_softmax(-1)
    token = int(torch.multinomial(log_probs_V.exp(), 1, generator=generator))
    if params.logprobs_mode is LogprobMode.RAW:
        log_probs_V = logits_V.log_softmax(-1)
    return token, float(log_probs_V[token])
