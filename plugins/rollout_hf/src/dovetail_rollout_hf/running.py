"""The sequences that are decoded in lock-step: one row per sample, one column per token.

Legend: N rows, M new rows, C columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.interfaces import FinishReason
from dovetail_rollout_hf.cache import Arrival, KvCache, Prefill, empty_index
from dovetail_rollout_hf.counts import DecodeCounts
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.noise import stream_seeds
from dovetail_rollout_hf.recompute import recompute
from dovetail_rollout_hf.rows import Finished, Row
from dovetail_rollout_hf.sampler import TokenSampler

_WORTH_COMPACTING = 0.75
"""Finished rows are removed when at most this share of the batch's rows still runs."""


class RunningBatch:
    """Decodes samples in lock-step, one row per sample. Rows are added and removed between steps; tensors move only at these times.

    Args:
        max_prefill_tokens: the token limit of one pass that recomputes rows after a weight update.
        counts: the counters of steps and tokens.
    """

    def __init__(
        self, decoder: Decoder, device: torch.device, max_prefill_tokens: int, counts: DecodeCounts
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._max_prefill_tokens = max_prefill_tokens
        self._counts = counts
        self.version = 0
        """The current weight version."""
        self._cache = KvCache()
        self.clear()

    def clear(self) -> None:
        """Drop every row without returning its sample."""
        self._cache.clear()
        self._rows: list[Row] = []
        self._active = 0
        self._end = 0
        empty_NC = torch.empty((0, 0), device=self._device)
        self._columns = {"ids": empty_NC.long(), "low": empty_NC.int(), "high": empty_NC.int()}
        self._logits_NV: Tensor | None = None
        self._sampler: TokenSampler | None = None
        self._watching = False

    def release(self) -> int:
        """Free the memory that an idle batch keeps for later rows, and return the number of freed bytes."""
        return self._cache.release()

    @property
    def active(self) -> int:
        """The number of running rows."""
        return self._active

    @property
    def rows(self) -> list[Row]:
        """The rows of unfinished samples."""
        return [row for row in self._rows if not row.done]

    def take_over(self) -> None:
        """Continue all running rows with the current weights, after recomputing their keys, values and next logits."""
        self._compact()
        if not self._active:
            return
        for row in self._rows:
            row.versions.append((self._end, self.version))
        prompts = [(row.pad, row.request) for row in self._rows]
        ids_NL = self._columns["ids"][:, : self._end]
        self._logits_NV = recompute(
            self._decoder, self._cache, ids_NL, prompts, self._max_prefill_tokens
        )
        self._counts.prefill_tokens += sum(self._end - row.pad for row in self._rows)

    def keep_over(self) -> None:
        """Continue all running rows with the current weights, but keep their keys and values.

        Each row's next token is still sampled from logits of the earlier weights.
        """
        for row in self._rows:
            row.versions.append((self._end + 1, self.version))

    # Entering and leaving

    def admit(self, arrivals: Sequence[tuple[Prefill, Sequence[Sequence[Row]]]]) -> None:
        """Add new rows to the batch after the prefill of their prompts.

        Args:
            arrivals: the prefill passes, each with a list of new rows for each of its prompts.
        """
        moves, new_rows, logits = [], [], []
        for prefill, rows_of_prompt in arrivals:
            source = [p for p, rows in enumerate(rows_of_prompt) for _ in rows]
            prompts_M = torch.tensor(source, device=self._device)
            moves.append(Arrival(prefill, prompts_M))
            if prefill.shift_P is not None:
                for shift, rows in zip(prefill.shift_P.tolist(), rows_of_prompt, strict=True):
                    for row in rows:
                        row.shift = shift
            new_rows += [row for rows in rows_of_prompt for row in rows]
            logits.append(prefill.logits_PV[prompts_M])
        self._rebuild(moves, new_rows, logits)

    def _compact(self) -> None:
        """Remove finished rows."""
        if self._active:
            self._rebuild([], [], None)
        else:
            self.clear()

    def _rebuild(
        self, arrivals: list[Arrival], new_rows: list[Row], logits: list[Tensor] | None
    ) -> None:
        """Drop finished rows, add new rows, and move all rows to the left as far as the longest row allows.

        Args:
            arrivals: the new rows' prompts, as the cache needs them.
            new_rows: the new rows.
            logits: the logits of the new rows' first tokens, one tensor per prefill; None if `step` computes all rows' logits afterwards.
        """
        kept = [index for index, row in enumerate(self._rows) if not row.done]
        kept_rows = [self._rows[index] for index in kept]
        kept_N = torch.tensor(kept, device=self._device) if kept else empty_index(self._device)
        begin = min((row.pad for row in kept_rows), default=self._end)
        lengths = [len(row.request.prompt_ids) for row in new_rows]
        end = max([self._end - begin, *lengths])
        shift = end - self._end
        for row in kept_rows:
            row.pad += shift
            row.start += shift
            row.versions = [(column + shift, version) for column, version in row.versions]
        for row, length in zip(new_rows, lengths, strict=True):
            row.pad, row.start, row.versions = end - length, end, [(end, self.version)]
        rows = kept_rows + new_rows
        capacity = max(row.last_column for row in rows) + 1
        self._cache.rebuild(
            kept_N=kept_N, span=(begin, self._end), end=end, capacity=capacity, arrivals=arrivals
        )
        self._move_columns(kept_N, begin, shift, capacity, len(new_rows))
        self._seed(new_rows, len(kept), end)
        if logits is not None:
            if kept and self._logits_NV is not None:
                logits = [self._logits_NV.index_select(0, kept_N), *logits]
            self._logits_NV = torch.cat(logits) if len(logits) > 1 else logits[0]
        self._rows, self._active, self._end = rows, len(rows), end
        self._prepare()

    def _move_columns(
        self, kept_N: Tensor, begin: int, shift: int, capacity: int, new: int
    ) -> None:
        """Move the kept rows' ids, seeds and log-probabilities by as many columns as their keys and values.

        Seeds are moved for the columns of future tokens, too.

        Args:
            kept_N: int64 [N], the indices of the rows to keep.
            begin: the first column that a kept row uses now.
            shift: the number of columns to move to the right; negative to the left.
            capacity: the number of columns after the move.
            new: the number of rows to append, filled with zeros.
        """
        for name, old in self._columns.items():
            fresh = old.new_zeros((len(kept_N) + new, capacity))
            width = min(old.shape[1], capacity - shift) - begin
            if len(kept_N) and width > 0:
                moved = old[:, begin : begin + width].index_select(0, kept_N)
                fresh[: len(kept_N), begin + shift : begin + shift + width] = moved
            self._columns[name] = fresh

    def _seed(self, new_rows: Sequence[Row], first: int, end: int) -> None:
        """Hash the noise seeds of all tokens that the new rows may produce."""
        if not new_rows:
            return
        streams = [row.request.streams[row.sample] for row in new_rows]
        keys_M2 = torch.tensor([stream.key() for stream in streams], device=self._device)
        starts_M = torch.tensor([stream.offset for stream in streams], device=self._device)
        count = max(row.last_column for row in new_rows) + 1 - end
        offsets_MT = starts_M[:, None] + torch.arange(count, device=self._device)
        for name, seeds_MT in zip(("low", "high"), stream_seeds(keys_M2, offsets_MT), strict=True):
            self._columns[name][first:, end : end + count] = seeds_MT

    def _prepare(self) -> None:
        """Prepare decoding for the current set of rows: build their sampler, and pass their padding and position offsets to the decoder."""
        sampling = [row.request.sampling for row in self._rows]
        self._sampler = TokenSampler(sampling, self._device)
        wanted = {
            "log_probs": any(s.log_probs for s in sampling),
            "raw_log_probs": any(s.raw_log_probs for s in sampling),
        }
        for name, here in wanted.items():
            if here and name not in self._columns:
                ids_NC = self._columns["ids"]
                self._columns[name] = torch.zeros_like(ids_NC, dtype=torch.float32)
        self._watching = any(row.stop.watches for row in self._rows)
        self._next_full = min(row.last_column for row in self._rows)
        pads = [row.pad for row in self._rows]
        pad_N = torch.tensor(pads, device=self._device) if any(pads) else None
        shifts = [row.shift for row in self._rows]
        shift_N = torch.tensor(shifts, device=self._device) if any(shifts) else None
        self._decoder.begin(self._cache, pad_N, shift_N)

    # Decoding

    def step(self) -> list[Finished]:
        """Sample one token for every row, run the model on rows that continue, and return the finished rows."""
        if self._sampler is None or self._logits_NV is None:
            return []
        column, columns = self._end, self._columns
        self._counts.steps += 1
        self._counts.generated_tokens += self._active
        here = slice(column, column + 1)
        draw = self._sampler.draw(
            self._logits_NV, columns["low"][:, here], columns["high"][:, here]
        )
        columns["ids"][:, column] = draw.tokens_N
        if draw.log_probs_N is not None:
            columns["log_probs"][:, column] = draw.log_probs_N
        if draw.raw_log_probs_N is not None:
            columns["raw_log_probs"][:, column] = draw.raw_log_probs_N
        finished = self._ended(draw.tokens_N, column)
        completions = self._finish(finished, column + 1)
        if self._active <= _WORTH_COMPACTING * len(self._rows):
            self._compact()
        if self._active:
            tokens_N = self._columns["ids"][:, self._end]
            self._logits_NV = self._decoder.step(tokens_N, self._end)
            self._end += 1
        return completions

    def _ended(self, tokens_N: Tensor, column: int) -> list[tuple[int, FinishReason]]:
        """Return the indices of the rows that end with the token in this column, each with the finish reason."""
        ended = []
        if self._watching:
            # A step waits for the device only here, and only if there are stop rules.
            for index, token in enumerate(tokens_N.tolist()):
                row = self._rows[index]
                if row.done or not row.stop.watches:
                    continue
                row.response.append(token)
                if row.stop.ends(row.response):
                    ended.append((index, FinishReason.STOP))
        if column >= self._next_full:
            stopped = {index for index, _ in ended}
            ended += [
                (index, FinishReason.LENGTH)
                for index, row in enumerate(self._rows)
                if not row.done and row.last_column == column and index not in stopped
            ]
            ended_now = {index for index, _ in ended}
            self._next_full = min(
                (
                    row.last_column
                    for index, row in enumerate(self._rows)
                    if not row.done and index not in ended_now
                ),
                default=column,
            )
        return ended

    def abort(self, chosen: Sequence[Row]) -> list[Finished]:
        """End these rows, and return them with their tokens so far."""
        numbers = {id(row): index for index, row in enumerate(self._rows) if not row.done}
        ended = [(numbers[id(row)], FinishReason.ABORT) for row in chosen if id(row) in numbers]
        completions = self._finish(ended, self._end)
        if not self._active:
            self.clear()
        return completions

    def _finish(self, ended: Sequence[tuple[int, FinishReason]], stop: int) -> list[Finished]:
        """Mark rows, given by index and finish reason, as finished, and return their completions of the tokens before column `stop`."""
        if not ended:
            return []
        rows_M = torch.tensor([index for index, _ in ended], device=self._device)
        host = {
            name: tensor.index_select(0, rows_M).cpu().numpy()
            for name, tensor in self._columns.items()
            if name not in ("low", "high")
        }
        completions = []
        for place, (index, reason) in enumerate(ended):
            row = self._rows[index]
            row.done = True
            taken = {name: values[place, row.start : stop].copy() for name, values in host.items()}
            completions.append((row.owner, row.completion(reason, taken)))
        self._active -= len(ended)
        return completions
