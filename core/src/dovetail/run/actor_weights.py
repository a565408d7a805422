"""ActorWeights: the version of the actor's weights that was last sent to the rollout engines, and the training steps since then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ACTOR = "actor"
"""The role whose weights are sent."""


class ActorWeights:
    """Counter of the versions of the actor's weights.

    `Learner`, which runs the stages, records updates. The experience source, which provides each step's samples, records each send to its
    rollout engines. Every generated token records a version: 0 for the weights of `model.path`, 1 for the first weights sent.
    """

    def __init__(self) -> None:
        self.version, self.sent = 0, 0
        self.moved, self.steps, self._everywhere = False, 0, False

    version: int
    """Version that was sent last."""
    moved: bool
    """Whether the actor's weights are newer than `version`."""
    steps: int
    """Number of training steps since the trainer last published (sent) weights."""
    sent: int
    """Number of sends in this process, including those that did not arrive."""

    @property
    def stale(self) -> bool:
        """Whether the actor's current weights must still be sent: this process has not sent them, or its last send failed."""
        return self.moved or not self._everywhere

    def updated(self, role: str) -> None:
        """Record that a role's weights have changed, or may have; roles other than the actor are ignored."""
        self.moved |= role == ACTOR

    @contextmanager
    def sending(self, arrived: Callable[[int], bool]) -> Iterator[int]:
        """Yield the version of the weights that the block sends: the last one sent if the actor is unchanged, else the next; at least 1.

        Args:
            arrived: a function that returns whether a receiver holds a version. If the block fails, a version that arrived counts as sent.
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
        """Restore what `state` returned; this process counts as having sent nothing."""
        self.version, self.moved = int(state["version"]), bool(state["moved"])
