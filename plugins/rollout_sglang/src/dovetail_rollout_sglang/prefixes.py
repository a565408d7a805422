"""Prefixes: samples of one prompt that come together wait until it has been computed once, and find it in the radix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import attrs

_WORTH_IT = 32
"""Tokens of a prompt from which on it is computed apart: that costs a request more, and shorter ones cost next to nothing."""


@attrs.define(eq=False)
class _Group:
    """Samples that came together with one prompt."""

    prompt_ids: Sequence[int]
    waiting: int = 0
    computed: asyncio.Future[None] | None = None


class Prefixes:
    """Has shared prompts computed before their samples are.

    SGLang finds in its cache what earlier steps have computed. Samples of a prompt that begin in the same step would each
    compute all of it.

    Args:
        compute: computes a prompt with a priority, and returns when that is done.
    """

    def __init__(self, compute: Callable[[Sequence[int], int], Awaitable[None]]) -> None:
        self._compute = compute
        self._groups: dict[int, _Group] = {}

    async def shared(self, prompt_ids: Sequence[int], priority: int = 0) -> None:
        """Return at once for a sample that is alone with its prompt; else when the prompt has been computed.

        Args:
            prompt_ids: the same object for all samples of a prompt that come together, as the calls of a request have it.
            priority: the samples' priority.
        """
        if len(prompt_ids) < _WORTH_IT:
            return
        group = self._groups.setdefault(id(prompt_ids), _Group(prompt_ids))
        group.waiting += 1
        try:
            # Those that came with this one are heard first.
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
                    group.computed.cancel()  # where all have been cancelled, nobody needs the prompt any more
