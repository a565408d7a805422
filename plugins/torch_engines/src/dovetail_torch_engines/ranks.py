"""Ranks: what the ranks of one engine exchange besides tensors. An error on one rank is raised on all ranks.

All messages are small and use the CPU's process group. A single process sends nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dovetail.dispatch import Mesh
from dovetail.errors import DispatchError, DovetailError, NumericsError


class Ranks:
    """The ranks of one engine: torch's default process group.

    Attributes:
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, mesh: Mesh | None, rank: int) -> None:
        """Check that torch's process group has as many ranks as the mesh.

        Raises:
            DispatchError: the mesh has several ranks, and the process group is missing or has another number of ranks.
        """
        self.rank, self.size = rank, mesh.size if mesh is not None else 1
        joined = dist.get_world_size() if dist.is_initialized() else 1
        if joined != self.size:
            raise DispatchError(
                f"the mesh {mesh} has {self.size} ranks, but torch's process group has {joined}",
                hint="the runtime must join all ranks in one process group before it starts the engine",
            )

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """Return the largest of the numbers that all ranks pass."""
        return int(max(self._gathered([float(number)])[:, 0].tolist()))

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers that all ranks pass."""
        return -self.largest(-number)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Return each number's sum over ranks, in float64 and in rank order: bit for bit the same on every rank."""
        total = torch.zeros(len(numbers), dtype=torch.float64)
        for row in self._gathered(numbers):
            total += row
        return [float(number) for number in total]

    def every(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that at least one rank passes, each name once, in rank order. Collective."""
        mine = list(names)
        if self.size == 1:
            return tuple(dict.fromkeys(mine))
        lists: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(lists, mine)
        return tuple(dict.fromkeys(name for names_of_one in lists for name in names_of_one))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Complete the block on all ranks, or raise on all ranks.

        Collective: every rank must reach the end of the block. If some ranks raise, every rank raises one of their errors; a
        NumericsError names the samples of all of these ranks.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error
        if self.size > 1:
            self._settle(failure)

    def _settle(self, failure: Exception | None) -> None:
        if not any(self._gathered([float(failure is not None)])[:, 0].tolist()):
            return
        errors: list[DovetailError | None] = [None] * self.size
        dist.all_gather_object(errors, _portable(failure, self.rank))
        failed = [error for error in errors if error is not None]
        samples = [
            sample
            for error in failed
            if isinstance(error, NumericsError)
            for sample in error.sample_ids
        ]
        # A numerics error without sample ids only says that another rank's samples caused it.
        named = [e for e in failed if isinstance(e, NumericsError) and e.sample_ids]
        chosen = (named or failed)[0]
        if isinstance(chosen, NumericsError):
            chosen.sample_ids = tuple(dict.fromkeys(samples))
        raise chosen from failure

    def _gathered(self, numbers: Sequence[float]) -> torch.Tensor:
        """Return the numbers of every rank, float64 [ranks, len(numbers)]."""
        mine = torch.tensor(list(numbers), dtype=torch.float64)
        if self.size == 1:
            return mine[None]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts)


def _portable(failure: Exception | None, rank: int) -> DovetailError | None:
    """Return the failure of a rank as an error that can be pickled and sent to other ranks; None if the rank has not failed."""
    if failure is None:
        return None
    if isinstance(failure, DovetailError):
        try:
            pickle.dumps(failure)
        except (pickle.PicklingError, TypeError, AttributeError):
            return DispatchError(f"rank {rank} failed: {failure}")
        return failure
    return DispatchError(f"rank {rank} failed: {type(failure).__name__}: {failure}")
