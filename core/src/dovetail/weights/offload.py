"""Which models are on the accelerator: a role that asks for it keeps off while it does not compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class OffloadManager:
    """Brings worker groups onto the accelerator when they are needed, and lets them go afterwards.

    Args:
        groups: the worker groups that are offloaded between their phases (`actor.offload`, …), by role.
        phase: times what is done under a name: `onload`, `offload`. Neither is a part of another phase.
    """

    def __init__(
        self,
        groups: Mapping[str, Any],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._phase, self._groups = phase, groups
        self._away: set[str] = set()

    def settle(self) -> None:
        """Let every such role go; called once the models are loaded, and before a rollout."""
        for role in self._groups:
            if role not in self._away:
                self._let_go(role)

    @contextmanager
    def present(self, role: str) -> Iterator[None]:
        """While the role computes. The actor stays afterwards until the next rollout: its weights are sent from there."""
        if role in self._away:
            with self._phase("onload"):
                self._groups[role].onload().result()
            self._away.discard(role)
        yield
        if role in self._groups and role != "actor":
            self._let_go(role)

    def _let_go(self, role: str) -> None:
        with self._phase("offload"):
            self._groups[role].offload().result()
        self._away.add(role)
