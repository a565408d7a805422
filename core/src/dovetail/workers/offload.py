"""OffloadManager: keeps the models of roles with `offload` off the accelerator while they do not compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs


@attrs.define(eq=False)
class OffloadManager:
    """Moves worker groups onto the accelerator before they compute, and off the accelerator afterwards.

    Args:
        groups: the worker groups that are offloaded between their phases (`actor.offload`, …), by role.
        phase: a function that times a block as a phase of the run, here `onload` or `offload`.
        generates: whether a rollout and these groups take turns with the accelerator. Otherwise the actor is offloaded only while other
            models compute.
        beside: all worker groups of models, by role.
    """

    _groups: Mapping[str, Any]
    _phase: Callable[[str], AbstractContextManager[None]]
    _generates: bool = attrs.field(default=True, kw_only=True)
    _beside: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)
    _away: set[str] = attrs.field(factory=set, init=False)

    def settle(self) -> None:
        """Move every role of `groups` off the accelerator; called once the models are loaded, and before a rollout."""
        self._let_go(self._groups)

    def free_caches(self) -> None:
        """Make the models on the accelerator release unused memory, before a sleeping rollout wakes.

        Memory in an allocator's cache would not be free for the rollout.
        """
        present = [group for role, group in self._beside.items() if role not in self._away]
        if present:
            with self._phase("offload"):
                for freeing in [group.free_cache() for group in present]:
                    freeing.result()

    @contextmanager
    def present(self, *roles: str) -> Iterator[None]:
        """Keep these roles on the accelerator within the block.

        The actor stays on the accelerator until the next rollout, since its weights are sent from there.
        """
        if roles and not self._generates:
            self._let_go(self._groups.keys() - roles)
        for role in roles:
            if role in self._away:
                with self._phase("onload"):
                    self._groups[role].onload().result()
                self._away.discard(role)
        yield
        self._let_go({*roles} - {"actor"})

    def _let_go(self, roles: Collection[str]) -> None:
        for role in self._groups:
            if role in roles and role not in self._away:
                with self._phase("offload"):
                    self._groups[role].offload().result()
                self._away.add(role)
