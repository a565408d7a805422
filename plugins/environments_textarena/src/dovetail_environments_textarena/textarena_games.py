"""Textarena: text games, in a separate interpreter."""

from __future__ import annotations

from pathlib import Path

from dovetail_environments import WorkerEnvironment
from dovetail_environments_textarena.config import TextarenaConfig


class Textarena(WorkerEnvironment):
    """Games of TextArena against the game itself, or against random moves.

    The observations since the player's last move form a user message; each move is a turn of the policy. The reward is the game's, in most
    games from −1 to 1. Parts are the reward by game, `turns`, and `invalid`: 1 where the game was lost by a move that its rules do not
    allow.

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments: {games: {name: textarena, games: [TicTacToe-v0, GuessTheNumber-v0], python: .venv-games/bin/python}}
    """

    name = "textarena"
    api = ">=1.0,<2"
    Config = TextarenaConfig
    file = Path(__file__).with_name("games.py")
    requires = ("textarena>=0.7,<0.8",)
