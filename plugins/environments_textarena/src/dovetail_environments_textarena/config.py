"""Config class of the environment `textarena`."""

from __future__ import annotations

import attrs

from dovetail.sections import ONE_OR_MANY
from dovetail_environments import WorkerSection


@attrs.frozen(kw_only=True)
class TextarenaConfig(WorkerSection):
    """Settings of `textarena`, which plays games of TextArena."""

    games: tuple[str, ...] = attrs.field(
        default=("GuessTheNumber-v0",),
        metadata={ONE_OR_MANY: True},
        validator=attrs.validators.min_len(1),
    )
    """Games by their names in TextArena, such as `TicTacToe-v0`; tasks are divided evenly among the games. In a two-player game, the policy
    plays against random moves, alternately as first and second player; the game's observations must then list the allowed moves, as
    those of board games do.
    """
