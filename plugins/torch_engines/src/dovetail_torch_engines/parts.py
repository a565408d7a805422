"""Samples grouped into micro-batches within a token budget: padded samples by length, packed samples by cost.

Legend: N samples of a batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Unit
from dovetail.workers import unit_ids
from dovetail_torch_engines.scored import scored_lengths

Rows = tuple[list[int], int, int, int]
"""Indices of rows that stay together, the id of their prompt, the prompt's length (0 if each row includes the prompt), and the length of
the longest row."""


@attrs.define(kw_only=True, eq=False, slots=False)
class Samples:
    """The lengths of a batch's samples, to divide the batch into micro-batches."""

    active: np.ndarray
    """int64: the indices of samples that are fed to the model: those with a scored token, or in one unit with such a sample."""
    prompt_N: np.ndarray
    """int64 [N]: id of each sample's prompt; samples with equal prompts have the same id."""
    prompts_N: np.ndarray
    """int64 [N]: number of tokens in each sample's prompt."""
    responses_N: np.ndarray
    """int64 [N]: number of tokens of each response that are fed to the model."""
    unit_N: np.ndarray | None = None
    """[N]: unit id of each sample; samples with the same id stay in one micro-batch. None: each sample is a unit."""

    @classmethod
    def of(cls, batch: Batch, unit: Unit = "sample") -> Samples:
        """Return the sizes of a batch's samples.

        The batch has the columns in `dovetail.interfaces.READS`. It also has the column of unit ids if a unit (samples that stay in one
        micro-batch) is not a single sample.

        The last scored token of a response is never fed to the model, since no token after it is predicted. A sample without scored
        tokens is fed only if another sample of its unit has scored tokens.
        """
        scored_N = scored_lengths(batch["response_mask"])
        active, unit_N = np.flatnonzero(scored_N), None
        if unit != "sample":
            unit_N = unit_ids(batch, unit)
            active = np.flatnonzero(np.isin(unit_N, unit_N[active]))
        return cls(
            active=active,
            prompt_N=distinct(batch["prompt_ids"]),
            prompts_N=batch["prompt_ids"].lengths,
            responses_N=np.maximum(scored_N - 1, 0),
            unit_N=unit_N,
        )

    def units(self) -> list[list[int]]:
        """Return the indices of samples to feed to the model, one list per unit (samples that stay in one micro-batch)."""
        if self.unit_N is None:
            return [[row] for row in self.active.tolist()]
        return [rows.tolist() for rows in _by_id(self.active, self.unit_N[self.active])]

    @cached_property
    def lengths_N(self) -> np.ndarray:
        """int64 [N]: number of tokens of each sample's prompt and response together."""
        return self.prompts_N + self.responses_N

    @cached_property
    def tokens(self) -> int:
        """The number of input tokens if every sample is fed with its own prompt."""
        return int(self.lengths_N[self.active].sum())

    @cached_property
    def tokens_shared(self) -> int:
        """The number of input tokens if each distinct prompt is fed once."""
        _, first = np.unique(self.prompt_N[self.active], return_index=True)
        prompts = self.prompts_N[self.active][first].sum()
        return int(prompts + self.responses_N[self.active].sum())


def distinct(prompts: Ragged) -> np.ndarray:
    """Return int64 [N], ids of prompts: prompts with equal tokens have the same id."""
    numbers: dict[bytes, int] = {}
    found = (numbers.setdefault(row.tobytes(), len(numbers)) for row in prompts)
    return np.fromiter(found, np.int64, len(prompts))


class MicroBatchRows:
    """Row indices of one micro-batch, and the micro-batch's cost in tokens, padding included."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.cost = self.prompts = self.longest_prompt = self.longest = 0
        self.last_prompt = -1

    def with_rows(
        self, rows: Sequence[int], prompt: int, prompt_length: int, length: int
    ) -> tuple[int, ...]:
        """Return the micro-batch's size with these rows of one prompt added: cost, number of prompts, length of longest prompt and row.

        Args:
            rows: the indices of the rows to add.
            prompt: the prompt's id (see `Samples.prompt_N`).
            prompt_length: the number of tokens of the prompt if it is fed apart from the rows; 0 if each row includes it.
            length: the number of tokens of the longest of these rows.
        """
        prompts = self.prompts + (prompt != self.last_prompt)
        longest_prompt = max(self.longest_prompt, prompt_length)
        longest = max(self.longest, length)
        cost = prompts * longest_prompt + (len(self.rows) + len(rows)) * longest
        return cost, prompts, longest_prompt, longest

    def add(self, rows: Sequence[int], prompt: int, after: tuple[int, ...]) -> None:
        """Add rows of one prompt; `after` is the result of `with_rows` for the same rows."""
        self.rows += rows
        self.last_prompt = prompt
        self.cost, self.prompts, self.longest_prompt, self.longest = after


def rows_of(parts: Sequence[MicroBatchRows], samples: Samples, at_least: int) -> list[np.ndarray]:
    """Return the row indices of each micro-batch, int64 [B] each; empty micro-batches are added up to `at_least`, and to at least one.

    The last micro-batch also has the samples that are not fed to the model. They cost nothing, but the caller needs every sample.
    """
    rows = [np.array(part.rows, np.int64) for part in parts]
    rows += [np.empty(0, np.int64)] * (max(1, at_least) - len(rows))
    idle = np.setdiff1d(np.arange(len(samples.prompts_N)), samples.active)
    rows[-1] = np.concatenate([rows[-1], idle])
    return rows


def padded_parts(samples: Samples, budget: int, at_least: int) -> list[MicroBatchRows]:
    """Divide samples into padded micro-batches within a token budget; each row is a prompt with its response.

    Units (samples that stay together) are added in order of their longest sample, longest first. For `at_least` see `_balanced`.
    """
    rows = [(unit, unit[0], 0, int(samples.lengths_N[unit].max())) for unit in samples.units()]
    rows.sort(key=lambda row: -row[-1])
    return _balanced(rows, budget, at_least)


def shared_parts(samples: Samples, budget: int, at_least: int) -> list[MicroBatchRows]:
    """Divide samples into padded micro-batches within a token budget; each distinct prompt of a micro-batch is fed once.

    Responses to one prompt are adjacent; prompts with long responses are added first. For `at_least` see `_balanced`.
    """
    active, prompt_N, lengths_N = samples.active, samples.prompt_N, samples.responses_N
    longest = np.zeros(int(prompt_N.max()) + 1, np.int64)
    np.maximum.at(longest, prompt_N[active], lengths_N[active])
    keys = (-lengths_N[active], prompt_N[active], -longest[prompt_N[active]])
    order = active[np.lexsort(keys)]
    rows = [
        ([int(row)], int(prompt_N[row]), int(samples.prompts_N[row]), int(lengths_N[row]))
        for row in order
    ]
    return _balanced(rows, budget, at_least)


def packed_parts(
    samples: Samples, budget: int, quadratic: float, at_least: int, *, shared: bool
) -> list[PackedRows]:
    """Return packed micro-batches of nearly equal cost, the most expensive first.

    Args:
        samples: the sizes of the samples.
        budget: the token limit of a micro-batch; a larger unit (samples that stay together) gets a micro-batch to itself.
        quadratic: the relative cost of attention: a sample of n tokens costs n · (1 + quadratic · n).
        at_least: the minimum number of micro-batches, unless there are fewer units.
        shared: whether responses to one prompt are packed together, with the prompt counted once.
    """
    units = _prompt_units(samples, budget) if shared else _whole_units(samples)
    for unit in units:
        unit.weigh(samples, quadratic)
    units.sort(key=lambda unit: -unit.weight)
    parts = _fewest(units, budget)
    if at_least > len(parts):
        # Every rank must run `at_least` micro-batches; if the units do not spread over so many, the caller adds empty ones.
        parts = _spread(units, at_least, budget) or parts
    filled = [part for part in parts if part.rows]
    return sorted(filled, key=lambda part: -part.weight)


class PackedRows(MicroBatchRows):
    """Samples that stay together, or a packed micro-batch of several such units."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0

    def weigh(self, samples: Samples, quadratic: float) -> None:
        """Compute the cost of these rows, by which micro-batches are balanced: tokens + quadratic · Σ length²."""
        attended = sum(int(samples.lengths_N[row]) ** 2 for row in self.rows)
        self.weight = self.cost + quadratic * attended

    def take(self, other: PackedRows) -> None:
        """Add all rows of another instance to this micro-batch."""
        self.rows += other.rows
        self.cost += other.cost
        self.weight += other.weight


def _whole_units(samples: Samples) -> list[PackedRows]:
    units = []
    for rows in samples.units():
        unit = PackedRows()
        unit.rows, unit.cost = rows, int(samples.lengths_N[rows].sum())
        units.append(unit)
    return units


def _prompt_units(samples: Samples, budget: int) -> list[PackedRows]:
    """Group the responses to each prompt into one unit, or into several units of about equal size if one would exceed the budget."""
    active = samples.active
    prompts = samples.prompt_N[active]
    units: list[PackedRows] = []
    for rows in _by_id(active, prompts):
        prompt, responses = int(samples.prompts_N[rows[0]]), samples.responses_N[rows]
        pieces = max(1, -(-int(responses.sum()) // max(1, budget - prompt)))
        level, taken, first = responses.sum() / pieces, 0, len(units)
        for row, length in zip(rows.tolist(), responses.tolist(), strict=True):
            full = taken > 0 and taken >= level * (len(units) - first)
            if len(units) == first or full or units[-1].cost + length > budget:
                units.append(PackedRows())
                units[-1].cost = prompt
            units[-1].rows.append(row)
            units[-1].cost += length
            taken += length
    return units


def _by_id(rows: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    """Group rows by id, in the order of the ids."""
    _, counts = np.unique(ids, return_counts=True)
    return np.split(rows[np.argsort(ids, kind="stable")], np.cumsum(counts)[:-1])


def _fewest(units: Sequence[PackedRows], budget: int) -> list[PackedRows]:
    """Spread units, the heaviest first, over nearly as few micro-batches as the budget allows."""
    count = max(1, -(-sum(unit.cost for unit in units) // budget))
    while (parts := _spread(units, count, budget)) is None:
        # A few parts more cost little; trying every count would take long.
        count += max(1, count // 20)
    return parts


def _spread(units: Sequence[PackedRows], count: int, budget: int) -> list[PackedRows] | None:
    """Spread units over `count` micro-batches: each unit, in the given order, goes to the lightest micro-batch with room for the unit.

    Return None if a unit fits into no micro-batch.
    """
    parts = [PackedRows() for _ in range(count)]
    heap = [(0.0, index) for index in range(count)]
    for unit in units:
        full = []
        while heap:
            weight, index = heapq.heappop(heap)
            if not parts[index].rows or parts[index].cost + unit.cost <= budget:
                break
            full.append((weight, index))
        else:
            return None
        parts[index].take(unit)
        heapq.heappush(heap, (parts[index].weight, index))
        for entry in full:
            heapq.heappush(heap, entry)
    return parts


def _balanced(rows: Sequence[Rows], budget: int, at_least: int) -> list[MicroBatchRows]:
    """Divide rows, in their order, into as few micro-batches as the token budget and `at_least` allow, and make the largest small.

    There may be fewer than `at_least` micro-batches if rows are few or of equal length.
    """
    best = _greedy(rows, budget)
    wanted = max(len(best), at_least)
    if wanted < 2:
        return best
    low, high = 0, budget
    while high - low > max(1, budget // 64):
        middle = (low + high) // 2
        tried = _greedy(rows, middle)
        if len(tried) <= wanted:
            best, high = tried, middle
        else:
            low = middle
    return best


def _greedy(rows: Sequence[Rows], budget: int) -> list[MicroBatchRows]:
    parts: list[MicroBatchRows] = []
    for own, prompt, prompt_length, length in rows:
        after = parts[-1].with_rows(own, prompt, prompt_length, length) if parts else (budget + 1,)
        if after[0] > budget:
            parts.append(MicroBatchRows())
            after = parts[-1].with_rows(own, prompt, prompt_length, length)
        parts[-1].add(own, prompt, after)
    return parts
