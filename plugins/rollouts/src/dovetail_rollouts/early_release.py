"""EarlyRelease: lets a step take finished groups ahead of groups that started earlier, unless a group would become too old to train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Protocol, TypeVar

import attrs


class Pending(Protocol):
    """The properties of a group that decide when a step takes it."""

    @property
    def finished(self) -> bool:
        """Whether every sample of the group has a score or has failed."""
        ...

    @property
    def due(self) -> int | None:
        """The last step that may train on the group, by the bound on staleness; None without a bound."""
        ...


G = TypeVar("G", bound=Pending)


@attrs.frozen(kw_only=True)
class EarlyRelease:
    """Lets a step take finished groups before earlier groups that are still running.

    Attributes:
        step: the number of the step that takes groups.
        batch: the number of groups that each step takes.
    """

    step: int
    batch: int

    def choose(self, admitted: Sequence[G], count: int) -> list[G] | None:
        """Return the groups to take, sorted by the last step that may train on them; None if the step has to wait.

        A group's deadline is `Pending.due`. The step takes the finished groups with the earliest deadlines if all other groups can then
        still meet their deadlines, provided that later steps take groups in the order of deadlines. Otherwise the step waits until the
        `count` groups with the earliest deadlines have finished.

        Args:
            admitted: the groups that no step has taken, at least `count` of them.
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
