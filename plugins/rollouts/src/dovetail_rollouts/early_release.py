"""Which groups a step takes before others that were admitted earlier, so that each is still trained on in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Protocol, TypeVar

import attrs


class Pending(Protocol):
    """A group as far as its order matters."""

    @property
    def finished(self) -> bool:
        """Whether all its samples have outcomes."""
        ...

    @property
    def due(self) -> int | None:
        """The last step that may train on it, by the bound on staleness; None without one."""
        ...


G = TypeVar("G", bound=Pending)


@attrs.frozen(kw_only=True)
class EarlyRelease:
    """Lets a step take finished groups before earlier ones that still run.

    Attributes:
        step: the step that takes groups.
        batch: the number of groups that each step takes.
    """

    step: int
    batch: int

    def choose(self, admitted: Sequence[G], count: int) -> list[G] | None:
        """Return the groups to take, those that are due first in front; None where the step has to wait.

        The first finished ones are taken as soon as each group that is left can be trained on in time, if every later step takes the
        groups that are due first (earliest deadline first). Where that can't be any more, the step waits for those that are due first.

        Args:
            admitted: the groups that no step has taken; at least `count`.
            count: the number of groups to take.
        """
        in_order = sorted(admitted, key=_due)
        chosen = list(islice((group for group in in_order if group.finished), count))
        if len(chosen) < count:
            return None
        taken = set(map(id, chosen))
        left = [group for group in in_order if id(group) not in taken]
        in_time = all(
            _due(group) > self.step + place // self.batch for place, group in enumerate(left)
        )
        first = all(group.finished for group in in_order[:count])
        return chosen if in_time or first else None


def _due(group: Pending) -> float:
    return math.inf if group.due is None else group.due
