"""`dovetail chat` keeps a conversation until the input ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.experience.rollout_pool import RolloutPool
from dovetail.interfaces.rollout import Completion, RolloutRequest
from dovetail.run.conversation import Conversation
from dovetail.run.data import read_tokenizer
from dovetail.run.inference import find_model, serving

OPTIONS = ("data.max_response_length=8", "model.dtype=float32", "rollout.top_k=1")


class Watched:
    """A pool that keeps the prompts of its requests."""

    def __init__(self, pool: RolloutPool) -> None:
        self.pool = pool
        self.prompts: list[list[int]] = []

    def submit(self, request: RolloutRequest) -> AsyncGenerator[Completion, None]:
        self.prompts.append(request.prompt_ids.tolist())
        return self.pool.submit(request)


def test_each_turn_sees_those_before(tiny: Path) -> None:
    source = find_model(str(tiny))
    config = source.load_config(None, OPTIONS).config
    tokenizer = read_tokenizer(config)
    with serving(config, config.model, tokenizer) as (pool, _):
        watched: Any = Watched(pool)
        talk = Conversation(config, tokenizer)
        answers = [talk.reply(watched, text) for text in ("hello", "and now?")]
    turns = ["hello", answers[0], "and now?"]
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
    for count, prompt in zip((1, 3), watched.prompts, strict=True):
        wanted = tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(prompt) == wanted


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
