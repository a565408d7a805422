"""Games of TextArena, in the interpreter that `make proofs` sets up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import Drawn, draw

from dovetail.interfaces import PluginContext, RolloutRequest
from dovetail_environments.config import EnvironmentRowsConfig, EnvironmentsConfig
from dovetail_environments.loop import EnvironmentsLoop
from dovetail_environments.rows import EnvironmentRows
from dovetail_environments.testing import EnvironmentConformance
from dovetail_environments.worker_pool import EnvironmentProcessError
from dovetail_environments_textarena.config import TextarenaConfig
from dovetail_environments_textarena.textarena_games import Textarena
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML

PYTHON = Path(__file__).parents[3] / ".venv-textarena" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="TextArena is not installed here; `make proofs` has it"
)
GUESS, TICTACTOE = "GuessTheNumber-v0", "TicTacToe-v0"

proof = pytest.mark.proofs
"""Mark of a test that needs TextArena."""


def section(*games: str, **settings: Any) -> TextarenaConfig:
    return TextarenaConfig(name="textarena", games=games, python=str(PYTHON), **settings)


def guess(prompt: str) -> str:
    """Guess the middle of the remaining range, by the hints so far."""
    low, high = 1, 20
    for number, hint in re.findall(
        r"assistant\s*\[(\d+)\].*?number is (higher|lower)", prompt, re.DOTALL
    ):
        low, high = (int(number) + 1, high) if hint == "higher" else (low, int(number) - 1)
    return f"[{(low + high) // 2}]"


def play(request: RolloutRequest, prompt: str) -> str:
    """Guess by halving the range; on a board, take the middle cell, else the first free cell."""
    if "Guess The Number" in prompt:
        return guess(prompt)
    free = re.findall(r"\[(\d)\]", prompt.rpartition("Available Moves:")[2].partition("\n")[0])
    return "[4]" if "4" in free else f"[{free[0]}]"


def episodes(game: str, policy: Any = play, tasks: int = 5, n: int = 10) -> list[Drawn]:
    """Run n episodes for each of a game's first tasks."""
    config = section(game, tasks=tasks, workers=2)
    rows = EnvironmentRows(
        EnvironmentRowsConfig(name="environments", environments={"games": config}), PluginContext()
    ).read(["games"])
    loop_config = EnvironmentsConfig(name="environments", environments={"games": config})
    found = []
    for row in rows:
        context = PluginContext(tokenizer=template_tokenizer(CHATML))
        loop = EnvironmentsLoop(loop_config, context)
        loop.start()
        try:
            found.append(
                draw(loop, policy, n=n, messages=row["prompt"], extra_info=row["extra_info"])
            )
        finally:
            loop.close()
    return found


@proof
@pytest.mark.parametrize("game", [GUESS, TICTACTOE])
def test_fifty_episodes_of_a_game_are_scored_and_trained_on_as_served(game: str) -> None:
    drawn = episodes(game)
    outputs = []
    for each in drawn:
        each.audit()
        for sample in each.samples:
            assert sample.score is not None, sample.outcome
            assert sample.trajectory is not None
            assert len(sample.sequences) == 1
            parts = sample.trajectory.output["parts"]
            assert parts["turns"] == len(sample.trajectory.turns)
            assert parts["invalid"] == 0
            outputs.append(sample.trajectory.output["reward"])
    assert len(outputs) == 50
    if game == GUESS:  # five halvings find one of twenty numbers
        assert set(outputs) == {1.0}
    else:
        assert set(outputs) <= {-1.0, 0.0, 1.0}
        # All episodes of a task are equal, since the task determines the other player's moves.
        assert all(
            len({s.trajectory.output["reward"] for s in each.samples if s.trajectory}) == 1
            for each in drawn
        )


@proof
def test_a_move_that_the_rules_do_not_allow_loses_and_is_a_score() -> None:
    [drawn] = episodes(TICTACTOE, lambda *_: "the middle", tasks=1, n=1)
    assert drawn.sample.trajectory is not None
    output = drawn.sample.trajectory.output
    assert (output["reward"], output["parts"]["invalid"]) == (-1.0, 1.0)


@proof
def test_a_game_that_there_is_not_is_named_with_the_nearest() -> None:
    config = EnvironmentRowsConfig(
        name="environments", environments={"games": section("tictactoe-v0")}
    )
    with pytest.raises(EnvironmentProcessError, match=r"tictactoe-v0.*TicTacToe-v0"):
        EnvironmentRows(config, PluginContext()).read(["games"])


def test_an_interpreter_without_textarena_is_told_how_to_get_it() -> None:
    config = EnvironmentRowsConfig(
        name="environments", environments={"games": TextarenaConfig(name="textarena")}
    )
    with pytest.raises(EnvironmentProcessError) as caught:
        EnvironmentRows(config, PluginContext()).read(["games"])
    assert "textarena<0.8,>=0.7 (not installed)" in str(caught.value)
    assert "-m pip install 'textarena>=0.7,<0.8'" in str(caught.value.hint)


@proof
class TestTextarena(EnvironmentConformance):
    plugin = Textarena
    turns = ("[5]",)

    def make_config(self) -> Any:
        return section(GUESS, TICTACTOE, tasks=6, workers=2)
