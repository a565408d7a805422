"""PromptLoader: batches of prompts, epoch after epoch, each prompt recorded in the ledger when issued."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.data.epoch_order import EpochOrder
from dovetail.data.ledger import BAD, OVERLONG, Ledger
from dovetail.errors import DataError
from dovetail.interfaces.data import Prompt, Sampler
from dovetail.interfaces.source_data import (
    BadRow,
    DatasetShape,
    IndexedPrompts,
    StreamedPrompts,
    digest_of,
)

FOLLOW_EVERY = 512
"""Number of streamed rows after which the dataset gets a new list of the rows to prepare ahead."""


class PromptLoader:
    """Loader that issues every prompt once an epoch. A batch may span the end of an epoch, so that no prompt is left over.

    Such a batch may contain a prompt twice, once for each epoch. The order depends on the sampler alone; the state is a position in that
    order. After a resume, prompts in flight come first, with their attempt numbers. If the sampler now gives another order, the epoch
    continues in the new order, without the prompts already issued.

    Args:
        prompts: the prompts of an epoch.
        sampler: the sampler, which determines the order of each epoch.
        batch_size: prompts a batch.
        ledger: records every prompt that is issued.
        datasets: the datasets behind the prompts, if the prompts are a mixture or streamed.
        window: the number of streamed rows that are read ahead and shuffled together.

    Raises:
        DataError: the batch size exceeds the number of prompts.
        LedgerError: the ledger was made for another number of prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampler: Sampler,
        batch_size: int,
        ledger: Ledger,
        *,
        datasets: Sequence[DatasetShape] = (),
        window: int = 1,
    ) -> None:
        if batch_size > len(prompts):
            raise DataError(
                f"data.train_batch_size is {batch_size} prompts, but there are only {len(prompts)} to train on",
                hint=f"set data.train_batch_size={max(len(prompts), 1)} or less, or add data",
            )
        self._prompts = prompts
        self._streamed = prompts if isinstance(prompts, StreamedPrompts) else None
        self._rows = EpochOrder(
            sampler, datasets or [DatasetShape(size=len(prompts))], window=window
        )
        self._names = (
            prompts.rows
            if isinstance(prompts, IndexedPrompts)
            else np.array([p.index for p in prompts], np.int64)
        )
        self._window = window
        self._batch_size = batch_size
        self._ledger = ledger
        ledger.expect(len(prompts))
        self._epoch = 0
        self._position = 0
        self._order: tuple[int, np.ndarray, np.ndarray, str] | None = None
        self._resumed = False
        self._ahead = -1, -1
        self._waiting: list[Prompt] = []
        self._held: set[tuple[int, int]] = set()
        self._digest: str | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts of an epoch."""
        return self._prompts

    @property
    def epoch(self) -> float:
        """Passes over the data so far: 1.5 is half-way through the second."""
        # Not computed from the position, which is ahead of the trained prompts, and after a resume behind until issued prompts are skipped.
        counts = self._ledger.counts()
        reached: int = counts["used"] + sum(counts["dropped"].values())
        return reached / len(self._prompts)

    def next_batch(self, size: int | None = None) -> list[Prompt]:
        """Return the next prompts, recorded in the ledger as issued.

        After a resume with smaller batches, prompts in flight may fill several batches.

        Args:
            size: the number of prompts; by default the batch size.
        """
        wanted = self._batch_size if size is None else size
        if self._resumed:
            self._waiting, self._resumed = self._in_flight(), False
        again, self._waiting = self._waiting[:wanted], self._waiting[wanted:]
        return again + [self._next() for _ in range(wanted - len(again))]

    def hold(self, prompt: Prompt) -> None:
        """Exclude a prompt from those issued again after a resume: it is in flight, but its samples were restored from the checkpoint."""
        self._held.add((prompt.epoch, prompt.index))

    def close(self) -> None:
        """Stop reading ahead, if prompts are streamed."""
        if self._streamed is not None:
            self._streamed.close()

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values: the position in the epoch, and digests of the data and of the epoch's order."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "data": self._fingerprint(),
            "order": self._ordering(self._epoch)[2],
            "streamed": self._streamed is not None,
            "bad": sorted(self._streamed.bad) if self._streamed else [],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state` returned. The ledger's state is loaded separately, before or after.

        If the order has changed, as with another seed or sampler, the epoch starts at the beginning of the new order, without the prompts
        that the ledger records as issued in this epoch.

        Raises:
            DataError: the state belongs to other data, only one of state and data is streamed, or the sampler gives no permutation.
        """
        streamed = self._streamed is not None
        if state["streamed"] != streamed:
            raise DataError(
                f"this run has data.streaming={str(streamed).lower()}, but the checkpoint's run had "
                f"data.streaming={str(state['streamed']).lower()}: the two settings order the rows differently",
                hint=f"resume with data.streaming={str(state['streamed']).lower()}",
            )
        if state["data"] != self._fingerprint():
            raise DataError(
                f"the training prompts are not those of the checkpoint: {len(self._prompts)} prompts with "
                f"digest {self._fingerprint()}; expected the digest {state['data']}",
                hint="resume with the same files, tokenizer, chat template with its arguments, and limits",
            )
        self._epoch = state["epoch"]
        same = state["order"] == self._ordering(self._epoch)[2]
        self._position = state["position"] if same else 0
        self._waiting, self._resumed, self._held = [], True, set()
        self._ahead = -1, -1
        if self._streamed:
            self._streamed.bad |= dict.fromkeys(state["bad"])

    def _in_flight(self) -> list[Prompt]:
        return [
            self.issued(epoch, prompt, attempt)
            for epoch, prompt, attempt in self._ledger.open()
            if (epoch, prompt) not in self._held
        ]

    def issued(self, epoch: int, name: int, attempt: int) -> Prompt:
        """Return a prompt of an epoch as it was issued.

        Args:
            epoch: the epoch.
            name: the prompt's index in this epoch (`Prompt.index`).
            attempt: the attempt's number, from 0.
        """
        rows, names = np.arange(len(self._names)), self._names
        if self._rows.mixture:
            rows, names, _ = self._ordering(epoch)
        row = int(rows[np.flatnonzero(names == name)[0]])
        return attrs.evolve(self._prompts[row], index=name, epoch=epoch, attempt=attempt)

    def _next(self) -> Prompt:
        """Return the next prompt that has not been issued in its epoch, and record it as issued."""
        left_out = 0
        while left_out < len(self._prompts):
            if self._position == len(self._prompts):
                self._epoch, self._position = self._epoch + 1, 0
            rows, names, _ = self._ordering(self._epoch)
            row, name = int(rows[self._position]), int(names[self._position])
            if not self._rows.mixture:
                name = int(self._names[row])
            # After an abandoned step or a changed order, prompts from this position on may have been issued already.
            if self._ledger.knows(self._epoch, name):
                self._position += 1
                continue
            prompt = self._read(row) if self._streamed else self._prompts[row]
            self._position += 1
            attempt = self._ledger.issue(self._epoch, name)
            if isinstance(prompt, Prompt):
                return attrs.evolve(prompt, index=name, epoch=self._epoch, attempt=attempt)
            self._ledger.drop(self._epoch, name, attempt, BAD if prompt else OVERLONG)
            left_out += 1
        raise DataError(
            f"no row can be trained on: each of the {left_out} is too long, or no prompt can be made from it",
            hint="raise data.max_length, or data.max_prompt_length and data.max_response_length",
        )

    def _read(self, row: int) -> Prompt | BadRow | None:
        """Return the prompt of a streamed row, and prepare the rows after it; None if the row is too long."""
        assert self._streamed is not None
        ahead = self._epoch, self._position // FOLLOW_EVERY
        if ahead != self._ahead:
            rows, _, _ = self._ordering(self._epoch)
            self._streamed.follow(rows[self._position : self._position + self._window])
            self._ahead = ahead
        return self._streamed.take(row)

    def _ordering(self, epoch: int) -> tuple[np.ndarray, np.ndarray, str]:
        """Return an epoch's rows in order, int64 [size], the result of `EpochOrder.names`, int64 [size], and a digest of the rows."""
        if self._order is None or self._order[0] != epoch:
            rows = np.ascontiguousarray(self._rows.rows(epoch), dtype="<i8")
            digest = hashlib.blake2b(rows.data, digest_size=8).hexdigest()
            self._order = (epoch, rows, self._rows.names(epoch, rows), digest)
        return self._order[1:]

    def _fingerprint(self) -> str:
        """Return a digest of the prompts' rows, tokens and images, and of examples' answers, in order."""
        if self._digest is None:
            prompts = self._prompts
            self._digest = (
                prompts.digest if isinstance(prompts, IndexedPrompts) else digest_of(prompts)
            )
        return self._digest
