"""ActorWeights: the version of the actor's weights that was sent last, and how far the actor has moved since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ACTOR = "actor"
"""The role whose weights are sent."""


class ActorWeights:
    """Counts the versions of the actor's weights. The learner records updates, sources record sends.

    A version is the number that every generated token records: 0 is what `model.path` holds, 1 the first that is sent.
    """

    def __init__(self) -> None:
        self.version, self.sent = 0, 0
        self.moved, self.steps, self._everywhere = False, 0, False

    version: int
    """Version that was sent last."""
    moved: bool
    """Whether the actor's weights are newer than that version."""
    steps: int
    """Steps learned since the trainer last published weights."""
    sent: int
    """Number of sends in this process, including those that did not arrive."""

    @property
    def stale(self) -> bool:
        """Whether the actor's weights have changed since this process sent them, or it has sent none."""
        return self.moved or not self._everywhere

    def updated(self, role: str) -> None:
        """Record that a role has taken optimizer steps, or may have."""
        self.moved |= role == ACTOR

    @contextmanager
    def sending(self, arrived: Callable[[int], bool]) -> Iterator[int]:
        """Yield the version that the block sends: the current one while the actor is unchanged, else the next; the first is 1.

        Args:
            arrived: whether a receiver holds a version; asked where the block fails, since no other weights may get its number.
        """
        version = self.version + (self.moved or not self.version)
        self._everywhere = False
        self.sent += 1
        try:
            yield version
        except BaseException:
            if arrived(version):
                self.version, self.moved = version, False
            raise
        self.version, self.moved, self._everywhere = version, False, True

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps."""
        return {"version": self.version, "moved": self.moved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was written; this process has sent nothing yet."""
        self.version, self.moved = int(state["version"]), bool(state["moved"])
