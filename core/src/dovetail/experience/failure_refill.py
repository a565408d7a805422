"""Refill after failed rewards: a group that lost samples gets others to the same prompt, as a new attempt in the ledger.

attempt 0 ── some of its samples failed ──► dropped(reward_failures), issued again ──► attempt 1: sound samples of before,
                                                                                      and new ones in place of the failed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

from dovetail.experience.generation import Generated

if TYPE_CHECKING:
    from dovetail.data.ledger import Ledger
    from dovetail.data.loader import Issued

REASON = "reward_failures"
"""Why the ledger drops an attempt of which samples could not be scored."""


class Generate(Protocol):
    """Draws and scores more samples of a step."""

    def __call__(
        self,
        issued: Sequence[Issued],
        n: Sequence[int],
        *,
        groups: Sequence[int],
        baseline: Sequence[bool],
    ) -> Generated:
        """So many samples to each prompt, of these groups, and a greedy one where `baseline` says so."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Refilled:
    """A round of generation after its refills."""

    generated: Generated
    """Everything: sound samples under their prompt's last attempt, and the failures under the one that they had."""
    issued: tuple[Issued, ...]
    """The prompts, each with its last attempt."""
    samples: int = 0
    """Responses that were drawn anew, greedy ones included."""


def thinned(generated: Generated, n: int) -> bool:
    """Whether a sample or a baseline of these prompts has no score."""
    return any(lack != (0, False) for lack in _lacks(generated, n).values())


def refill(
    generated: Generated,
    issued: Sequence[Issued],
    *,
    n: int,
    whole: bool,
    ledger: Ledger,
    generate: Generate,
) -> Refilled:
    """Draw once more in place of what could not be scored.

    Args:
        generated: the round so far, with all earlier refills.
        issued: its prompts, each under its last attempt, which is in flight.
        n: samples that a group should have.
        whole: draw a thinned group anew as a whole, because its scores depend on each other; its sound samples of before
            are left out.
        ledger: where the attempts are entered.
        generate: draws and scores.
    """
    lacks = _lacks(generated, n)
    again: list[tuple[int, Issued]] = []
    latest = []
    for (group, lack), item in zip(lacks.items(), issued, strict=True):
        if lack != (0, False):
            ledger.drop(item.epoch, item.prompt.index, item.attempt, REASON)
            attempt = ledger.issue(item.epoch, item.prompt.index)
            item = attrs.evolve(item, attempt=attempt)  # noqa: PLW2901 - it goes on under its new name
            again.append((group, item))
        latest.append(item)
    anew = {group for group, _ in again if whole and lacks[group][0]}
    counts = [n if group in anew else lacks[group][0] for group, _ in again]
    baseline = [lacks[group][1] for group, _ in again]
    more = generate(
        [item for _, item in again], counts, groups=[group for group, _ in again], baseline=baseline
    )
    names = dict(again)
    before = [
        attrs.evolve(s, issued=names[s.group]) if s.score is not None and s.group in names else s
        for s in generated.samples
        if s.score is None or s.group not in anew
    ]
    samples = sorted([*before, *more.samples], key=lambda sample: sample.group)
    redrawn = {sample.group for sample in more.baselines}
    baselines = [s for s in generated.baselines if s.group not in redrawn] + [*more.baselines]
    return Refilled(
        generated=Generated(
            samples=tuple(samples),
            baselines=tuple(sorted(baselines, key=lambda sample: sample.group)),
        ),
        issued=tuple(latest),
        samples=len(more.samples) + len(more.baselines),
    )


def _lacks(generated: Generated, n: int) -> dict[int, tuple[int, bool]]:
    """Each group, in order: how many of its n samples have no score, and whether its baseline has none."""
    scored = Counter(s.group for s in generated.samples if s.score is not None)
    unscored = {s.group for s in generated.baselines if s.score is None}
    groups = dict.fromkeys(sample.group for sample in generated.samples)
    return {group: (n - scored[group], group in unscored) for group in groups}
