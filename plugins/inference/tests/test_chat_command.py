"""`dovetail chat` keeps a conversation until the input ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail_sdk.testing import tiny_model_and_tokenizer

FAILS = '''
from dovetail.interfaces import AgentLoop, EpisodeError, FailureKind


class Fails(AgentLoop):
    """Fails after its turn."""

    name = "fails"
    api = ">=1.0,<2"

    async def run(self, session):
        turn = await session.generate(max_new_tokens=2)
        raise EpisodeError(FailureKind.ENVIRONMENT, f"the game is {turn.stop} tokens too long")
'''
OPTIONS = ("data.max_response_length=8", "model.dtype=float32", "rollout.top_k=1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen2 with its tokenizer."""
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=300)


def test_a_failed_answer_of_an_agent_loop_is_shown_and_left_out(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(FAILS)
    path = json.dumps(str(tmp_path / "loop.py"))
    loop = f"rollout.agent_loop={{path: {path}, attribute: Fails}}"
    command = ["chat", str(tiny), *OPTIONS, loop]
    done = CliRunner().invoke(main, command, input="hello\nonce more\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("[failed: environment] the game is 2 tokens too long") == 2


def test_the_command_answers_and_ends_with_the_input(tiny: Path) -> None:
    done = CliRunner().invoke(main, ["chat", str(tiny), *OPTIONS], input="hello\n\nagain\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("> ") >= 4
    assert not any(ord(c) < 0x20 and c not in "\n\t" for c in done.output)


@pytest.mark.parametrize("option", ["data.max_response_length=100000", "rollout=vlm"])
def test_what_can_not_be_answered_is_one_error(tiny: Path, option: str) -> None:
    done = CliRunner().invoke(main, ["chat", str(tiny), option], input="hello\n")
    assert done.exit_code in (1, 2)
    assert "error: " in done.output
