"""Textarena: an environment of text games, run in a separate interpreter."""

from __future__ import annotations

from pathlib import Path

from dovetail_environments import WorkerEnvironment
from dovetail_environments_textarena.config import TextarenaConfig


class Textarena(WorkerEnvironment):
    """Plays games of TextArena, alone or against random moves.

    The observations since the policy's last move form a user message; each turn of the policy is a move. The reward is the game's, in most
    games from −1 to 1. The reward components are the reward under the game's name, `turns`, and `invalid`: 1 if an invalid move lost the
    game.

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
