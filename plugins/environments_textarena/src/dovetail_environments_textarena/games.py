"""Plays TextArena's games. `worker.py` of dovetail-environments runs this file in an interpreter with TextArena, without Dovetail."""

from __future__ import annotations

import random
import re
from typing import Any

import textarena

_APART = 2**30
"""Distance between the seeds of training games and of held-out games."""


def tasks(settings: dict[str, Any], count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return tasks, each a game with a seed, a player number and that player's first observation."""
    games, first = settings["games"], settings["seed"] + _APART * held_out
    found = []
    for number in range(count):
        name = games[number % len(games)]
        turn = number // len(games)
        task = {"game": name, "seed": first + turn, "seat": turn % Game.seats(name)}
        found.append({"prompt": Game(task).until_own_move(), "task": task})
    return found


def episode(_settings: dict[str, Any], task: dict[str, Any], model: Any) -> dict[str, Any]:
    """Play a game, and return the policy's `reward` and the reward components `parts`."""
    game, messages, turns = Game(task), list[dict[str, str]](), 0
    shown = game.until_own_move()
    while shown is not None:
        messages.append({"role": "user", "content": shown})
        move = model.chat(messages)
        messages.append({"role": "assistant", "content": move})
        turns += 1
        shown = None if game.moved(move) else game.until_own_move()
    reward, invalid = game.outcome()
    return {
        "reward": reward,
        "parts": {task["game"]: reward, "turns": turns, "invalid": float(invalid)},
    }


class Game:
    """A game from the view of one player, the policy.

    Args:
        task: the mapping with `game`, `seed` and `seat` (the policy's player number).
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self._seat, self._random = task["seat"], random.Random(task["seed"])
        # The variant `-raw` shows a player what has happened since the player's last turn. Other variants repeat the whole game each turn.
        self._game = textarena.make(f"{task['game']}-raw")
        self._game.reset(num_players=self.seats(task["game"]), seed=task["seed"])
        self._over = False

    @staticmethod
    def seats(name: str) -> int:
        """Return the number of players of a game: one or two.

        Raises:
            ValueError: there is no such game, or it has more than two players.
        """
        known = textarena.envs.registration.ENV_REGISTRY
        if f"{name}-raw" not in known:
            near = [game for game in known if game.partition("-")[0].lower() == name.partition("-")[0].lower()]  # fmt: skip
            raise ValueError(f"TextArena has no game {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")  # fmt: skip
        for seats in (1, 2):
            game = textarena.make(f"{name}-raw")
            try:
                game.reset(num_players=seats, seed=0)
            except AssertionError:
                continue
            return seats
        raise ValueError(
            f"the game {name!r} needs more than two players; expected a game for one or two"
        )

    def until_own_move(self) -> str | None:
        """Let the other player move until it is the policy's turn, and return the policy's observation; None if the game is over."""
        while not self._over:
            player, seen = self._game.get_observation()
            text = "\n".join(
                message for sender, message, kind in seen
                if not (sender == player and kind.name == "PLAYER_ACTION")
            )  # fmt: skip
            if player == self._seat:
                return text.strip()
            self.moved(self._open_move(text))
        return None

    def moved(self, move: str) -> bool:
        """Make a move for the player whose turn it is, and return whether the game is over."""
        self._over, _ = self._game.step(action=move)
        return self._over

    def outcome(self) -> tuple[float, bool]:
        """Return the policy's reward, and whether the policy lost by an invalid move."""
        rewards, known = self._game.close()
        return float(rewards[self._seat]), bool(known[self._seat].get("invalid_move"))

    def _open_move(self, text: str) -> str:
        """Return a random move of those that a text lists after `Moves:`.

        Raises:
            ValueError: the text lists no moves.
        """
        listed = re.findall(r"[Mm]oves?:(.*)", text)
        moves = re.findall(r"\[[^\]\[]+\]", listed[-1]) if listed else []
        if not moves:
            raise ValueError("the other player can't move: the game's text lists no moves after `Moves:`; choose a game for one player, or one that lists them")  # fmt: skip
        return self._random.choice(moves)
