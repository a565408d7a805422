"""LogProbRecorder: holds log-probabilities on the accelerator until their request has ended.

vLLM sends the log-probability of every token between processes as an object, which costs several times as much as sending the
token. The recorder stores log-probabilities on the accelerator instead. All values of a finished request are fetched at once.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_KEPT_PASSES = 1000
"""Number of the model's passes for which an ended request's values are kept; those of cancelled calls are never fetched."""


class LogProbRecorder:
    """Wraps the sampler of a vLLM worker, and stores the log-probability of each sampled token instead of returning it.

    Both of vLLM's model runners are supported: v1, which has the batch in `input_batch`, and v2, which passes the batch to the sampler.

    Args:
        runner: vLLM's model runner; `attach` checks whether it is supported.
        rows: the initial capacity in requests, running and finished; it grows if finished requests are not taken in time.
        longest: the maximum number of tokens of a request.
    """

    def __init__(self, runner: Any, rows: int, longest: int) -> None:
        self._runner, self._sampler = runner, runner.sampler
        self._longest = longest
        self._log_probs = torch.full((rows, longest), torch.nan, device=runner.device)
        """Row 0 takes the values of requests that sample nothing in a pass, such as one whose prompt is computed in chunks."""
        self._free = list(range(1, rows))
        self._rows: dict[str, int] = {}
        self._passes = 0
        self._seen: dict[str, int] = {}
        """Request → the last pass at which the batch changed and had the request."""
        self._ids: list[str] = []
        self._rows_N = np.zeros(0, np.int64)

    @staticmethod
    def attach(worker: Any) -> LogProbRecorder | None:
        """Attach a recorder to a worker; return None if the sampler's output can't be assigned to requests."""
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
        """Run vLLM's sampler, and store the log-probability of each request's sampled token.

        Log-probabilities of the sampled tokens alone are then removed from the output, so that vLLM does not send them.
        """
        output = self._sampler(*args, **kwargs)
        tensors = output.logprobs_tensors
        if tensors is None:
            return output
        ids, lengths_N, prompts_N, whole_N = self._batch(args)
        if len(ids) != len(tensors.logprobs):
            return output
        rows_N = np.where(whole_N, self._rows_of(ids), 0)
        places_N = torch.from_numpy(
            rows_N * self._longest + (lengths_N - prompts_N) % self._longest
        )
        chosen_N = tensors.logprobs[:, 0].float()
        self._log_probs.view(-1)[places_N.to(chosen_N.device, non_blocking=True)] = chosen_N
        if tensors.logprobs.shape[1] == 1:
            output.logprobs_tensors = None
        return output

    def take(self, lengths: Mapping[str, int]) -> dict[str, str | None]:
        """Return the log-probabilities of finished requests, and delete them from the recorder.

        Args:
            lengths: the number of tokens T of each request, by vLLM's internal request id.

        Returns:
            float32 [T] of each request, in nats, as base64-encoded bytes; None for an unknown request.
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
            self._give_up(name)
        return found

    def _batch(self, args: Sequence[Any]) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """Return what is known of the N requests of this pass.

        Returns:
            The request ids; each request's number of tokens so far, int64 [N]; the length of its prompt, int64 [N]; and
            whether it samples a token in this pass, bool [N]: a prompt that is computed in chunks does so only at the last chunk.
        """
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
        """Return each request's row in the store, int64 [N], cached until the batch changes."""
        self._passes += 1
        if ids != self._ids:
            new = [name for name in ids if name not in self._rows]
            if len(new) > len(self._free):
                self._make_room(len(new))
            if new:
                rows = [self._free.pop() for _ in new]
                self._rows |= dict(zip(new, rows, strict=True))
                self._log_probs[torch.tensor(rows, device=self._log_probs.device)] = torch.nan
            self._seen |= dict.fromkeys(ids, self._passes)
            self._rows_N = np.array([self._rows[name] for name in ids], np.int64)
            self._ids = list(ids)
        return self._rows_N

    def _make_room(self, count: int) -> None:
        """Free the rows of requests that ended long ago and were not fetched; if these are too few, add rows."""
        states = getattr(self._runner, "req_states", None)
        live = self._runner.requests if states is None else states.req_id_to_index
        long_ago = self._passes - _KEPT_PASSES
        for name in [n for n, seen in self._seen.items() if seen < long_ago and n not in live]:
            self._give_up(name)
        if count > len(self._free):
            rows = len(self._log_probs)
            more = torch.full_like(self._log_probs[:1], torch.nan).repeat(max(rows, count), 1)
            self._log_probs = torch.cat([self._log_probs, more])
            self._free += range(rows, len(self._log_probs))

    def _give_up(self, name: str) -> None:
        self._free.append(self._rows.pop(name))
        del self._seen[name]
