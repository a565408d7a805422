"""Prefixes: samples of one prompt that arrive together wait until the prompt has been computed once and is in the radix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import attrs

_WORTH_IT = 32
"""Minimum length in tokens of a prompt that is computed first; for shorter prompts, the additional request costs more than it saves."""


@attrs.define(eq=False)
class _Group:
    """Samples of one prompt that arrived together."""

    prompt_ids: Sequence[int]
    waiting: int = 0
    computed: asyncio.Future[None] | None = None


class Prefixes:
    """Computes shared prompts once, before their samples start.

    SGLang's prefix cache only has prompts that earlier engine steps computed. Without this class, samples of one prompt that start in the
    same engine step would each compute the whole prompt.

    Args:
        compute: a function that is given a prompt and a priority, and returns when the engine has computed the prompt.
    """

    def __init__(self, compute: Callable[[Sequence[int], int], Awaitable[None]]) -> None:
        self._compute = compute
        self._groups: dict[int, _Group] = {}

    async def shared(self, prompt_ids: Sequence[int], priority: int = 0) -> None:
        """Wait until a prompt that several samples share has been computed; return at once for a single sample or a short prompt.

        Args:
            prompt_ids: the token ids; the same object for all samples of a prompt that arrive together.
            priority: the priority of the samples.
        """
        if len(prompt_ids) < _WORTH_IT:
            return
        group = self._groups.setdefault(id(prompt_ids), _Group(prompt_ids))
        group.waiting += 1
        try:
            # Let the other samples that arrived with this one be counted first.
            await asyncio.sleep(0)
            if group.computed is None:
                if group.waiting == 1:
                    return
                group.computed = asyncio.ensure_future(self._compute(prompt_ids, priority))
            await asyncio.shield(group.computed)
        finally:
            group.waiting -= 1
            if not group.waiting:
                self._groups.pop(id(prompt_ids), None)
                if group.computed is not None:
                    group.computed.cancel()  # every sample was cancelled
