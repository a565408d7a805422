"""Admission: the queue of waiting requests, and the prefill of their prompts when they enter the running batch."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from dovetail.interfaces import RolloutRequest
from dovetail_rollout_hf.cache import Prefill
from dovetail_rollout_hf.counts import DecodeCounts
from dovetail_rollout_hf.decoder import Decoder
from dovetail_rollout_hf.pictures import pictures_of
from dovetail_rollout_hf.rows import Row
from dovetail_rollout_hf.tickets import Ticket

_ADMIT_SHARE = 4
"""Divisor of the maximum number of rows. Waiting samples start when at least this part (a quarter) of the rows is free, or if fewer
rows suffice for all waiting samples."""

Group = tuple[RolloutRequest, list[Row]]
"""A request, and the rows (samples) of it that start now."""


class Admission:
    """The queue of waiting requests, ordered by priority, then by arrival.

    Args:
        decoder: the decoder that computes keys and values of prompts.
        device: the device of the model.
        max_rows: the maximum number of running rows (samples).
        max_prefill_tokens: the token limit of one prefill pass, padding included.
        counts: the counters of prefilled tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        *,
        max_rows: int,
        max_prefill_tokens: int,
        counts: DecodeCounts,
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._counts = counts
        self._pending: deque[Ticket] = deque()

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._pending)

    def wait(self, ticket: Ticket) -> None:
        """Queue a request after all requests with the same or a lower priority number."""
        insort(self._pending, ticket, key=lambda other: other.request.priority)

    def forget_ended(self) -> None:
        """Remove requests whose samples have all started or ended."""
        self._pending = deque(ticket for ticket in self._pending if ticket.waiting)

    def clear(self) -> None:
        """Drop all waiting requests."""
        self._pending.clear()

    def enter(self, active: int) -> list[tuple[Prefill, list[list[Row]]]]:
        """Remove requests from the queue while there are free rows, and prefill their prompts.

        Args:
            active: the number of running rows.

        Returns:
            Each prefill pass, with a list of new rows for each of its prompts; empty if no row starts.
        """
        free = self._max_rows - active
        waiting = sum(len(ticket.waiting) for ticket in self._pending)
        if not waiting or free < min(self._max_rows // _ADMIT_SHARE, waiting):
            return []
        groups: list[Group] = []
        while self._pending:
            ticket = self._pending[0]
            whole = len(ticket.waiting)
            if whole > free and (groups or active or not free):
                break
            samples = [ticket.waiting.popleft() for _ in range(min(whole, free))]
            rows = [Row(ticket, ticket.request, sample, ticket.stop) for sample in samples]
            groups.append((ticket.request, rows))
            free -= len(rows)
            if not ticket.waiting:
                self._pending.popleft()
        return [self._prefill(chunk) for chunk in self._chunks(groups)]

    def _chunks(self, groups: list[Group]) -> list[list[Group]]:
        """Divide groups into chunks of similar prompt length, each within the prefill budget."""
        ordered = sorted(groups, key=lambda group: -len(group[0].prompt_ids))
        chunks: list[list[Group]] = []
        for group in ordered:
            longest = len(chunks[-1][0][0].prompt_ids) if chunks else 0
            if chunks and longest * (len(chunks[-1]) + 1) <= self._max_prefill_tokens:
                chunks[-1].append(group)
            else:
                chunks.append([group])
        return chunks

    def _prefill(self, groups: Sequence[Group]) -> tuple[Prefill, list[list[Row]]]:
        """Prefill the prompts of the groups, each once for all its rows; return the pass, and the rows that continue each prompt."""
        lengths = [len(request.prompt_ids) for request, _ in groups]
        longest = max(lengths)
        ids_PL = np.zeros((len(groups), longest), dtype=np.int64)
        for row, (request, _) in enumerate(groups):
            ids_PL[row, longest - lengths[row] :] = request.prompt_ids
        pads = [longest - length for length in lengths]
        pad_P = torch.tensor(pads, device=self._device) if any(pads) else None
        self._counts.prefill_tokens += sum(lengths)
        pictures = pictures_of([r for r, _ in groups], pads, longest, self._device)
        prefill = self._decoder.prefill(torch.from_numpy(ids_PL).to(self._device), pad_P, pictures)
        return prefill, [rows for _, rows in groups]
