"""Settings of the environment `textarena`."""

from __future__ import annotations

import attrs

from dovetail.sections import ONE_OR_MANY
from dovetail_environments import WorkerSection


@attrs.frozen(kw_only=True)
class TextarenaConfig(WorkerSection):
    """Games of TextArena."""

    games: tuple[str, ...] = attrs.field(
        default=("GuessTheNumber-v0",),
        metadata={ONE_OR_MANY: True},
        validator=attrs.validators.min_len(1),
    )
    """Games by their names in TextArena, such as `TicTacToe-v0`; tasks are divided evenly. A game of two is played against random moves,
    the policy taking each seat in turn; its observations have to list the allowed moves, as those of board games do."""
