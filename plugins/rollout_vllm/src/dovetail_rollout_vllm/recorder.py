"""LogProbRecorder: log-probabilities stay on the accelerator until their request has ended.

vLLM takes the log-probability of every token from process to process as an object of its own, which costs it several times what the
token costs. Here they are noted where they are computed, and a finished request's are fetched at once.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class LogProbRecorder:
    """Stands before the sampler of a vLLM worker, and keeps what it says of each sampled token instead of passing it on.

    Both of vLLM's model runners are known: the one that keeps its batch (`input_batch`), and the one that hands it to the sampler.

    Args:
        runner: vLLM's model runner; `attach` says whether it can be recorded.
        rows: requests that are kept, running and finished.
        longest: tokens of a request at most.
    """

    def __init__(self, runner: Any, rows: int, longest: int) -> None:
        self._runner, self._sampler = runner, runner.sampler
        self._longest = longest
        self._log_probs = torch.full((rows + 1, longest), torch.nan, device=runner.device)
        """The last row is written where a row of the batch samples nothing, as within a prompt that is computed in parts."""
        self._free = list(range(rows))
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []
        self._rows_N = np.zeros(0, np.int64)

    @staticmethod
    def attach(worker: Any) -> LogProbRecorder | None:
        """Make one for a worker; None where its sampler's output can't be told apart by request."""
        runner, config = worker.model_runner, worker.vllm_config
        if getattr(runner, "sampler", None) is None or config.speculative_config is not None:
            return None
        known = hasattr(runner, "optimistic_seq_lens_cpu") or hasattr(runner, "req_states")
        if not known or getattr(runner, "batch_sharder", None) is not None:
            return None
        rows = 2 * config.scheduler_config.max_num_seqs
        recorder = LogProbRecorder(runner, rows, config.model_config.max_model_len)
        runner.sampler = recorder
        return recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and note what is to be returned of each request: its log-probability at its place."""
        output = self._sampler(*args, **kwargs)
        tensors = output.logprobs_tensors
        if tensors is None:
            return output
        ids, lengths_N, prompts_N, whole_N = self._batch(args)
        if len(ids) != len(tensors.logprobs):
            return output
        rows_N = np.where(whole_N, self._rows_of(ids), len(self._log_probs) - 1)
        places_N = torch.from_numpy(
            rows_N * self._longest + (lengths_N - prompts_N) % self._longest
        )
        chosen_N = tensors.logprobs[:, 0].float()
        self._log_probs.view(-1)[places_N.to(chosen_N.device, non_blocking=True)] = chosen_N
        if tensors.logprobs.shape[1] == 1:
            output.logprobs_tensors = None
        return output

    def take(self, lengths: Mapping[str, int]) -> dict[str, str | None]:
        """Return the log-probabilities of finished requests, and forget them.

        Args:
            lengths: tokens T of each, by vLLM's own name of the request.

        Returns:
            float32 [T], in nats, as bytes in base 64; None of a request that is not known.
        """
        found: dict[str, str | None] = dict.fromkeys(lengths)
        known = [name for name in lengths if name in self._rows]
        if not known:
            return found
        longest = max(lengths[name] for name in known)
        rows_M = torch.tensor([self._rows[name] for name in known], device=self._log_probs.device)
        kept_ML = self._log_probs[rows_M, :longest].cpu().numpy()
        for name, kept_L in zip(known, kept_ML, strict=True):
            found[name] = base64.b64encode(kept_L[: lengths[name]].tobytes()).decode()
            self._free.append(self._rows.pop(name))
        return found

    def _batch(self, args: Sequence[Any]) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """Names [N]; tokens so far and of the prompt, int64 [N]; whether the row samples its next token, bool [N]."""
        runner = self._runner
        if hasattr(runner, "optimistic_seq_lens_cpu"):
            batch, count = runner.input_batch, runner.input_batch.num_reqs
            lengths_N = runner.optimistic_seq_lens_cpu[:count].numpy().astype(np.int64)
            discarded_N = runner.discard_request_mask.np[:count].astype(np.bool_)
            return batch.req_ids, lengths_N, batch.num_prompt_tokens[:count], ~discarded_N
        batch = args[1]
        lengths_N = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].numpy().astype(np.int64)
        prompts_N = runner.req_states.prompt_len.np[batch.idx_mapping_np]
        return batch.req_ids, lengths_N, prompts_N, lengths_N >= batch.prefill_len_np

    def _rows_of(self, ids: Sequence[str]) -> np.ndarray:
        """The row of each request, int64 [N]; they change only where the batch does."""
        if ids != self._ids:
            new = [name for name in ids if name not in self._rows]
            if len(new) > len(self._free):
                self._forget(len(new) - len(self._free))
            fresh = [self._free.pop() for _ in new[: len(self._free)]]
            self._rows |= dict(zip(new, fresh, strict=False))
            if fresh:
                self._log_probs[torch.tensor(fresh, device=self._log_probs.device)] = torch.nan
            lost = len(self._log_probs) - 1
            self._rows_N = np.array([self._rows.get(name, lost) for name in ids], np.int64)
            self._ids = list(ids)
        return self._rows_N

    def _forget(self, count: int) -> None:
        """Give up rows of requests that have ended and were never asked for, the oldest first."""
        states = getattr(self._runner, "req_states", None)
        live = self._runner.requests if states is None else states.req_id_to_index
        ended = [name for name in self._rows if name not in live]
        for name in ended[:count]:
            self._free.append(self._rows.pop(name))
