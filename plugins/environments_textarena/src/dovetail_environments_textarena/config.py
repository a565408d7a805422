"""Settings of textarena."""

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
    """Its games by their names there, such as `TicTacToe-v0`; as many tasks are of each. A game of two is played against random moves, with
    the seats in turn; its observations have to list the moves that are open, as boards do."""
