"""`dovetail chat` keeps a conversation until the input ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Hashable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.interfaces.rollout import Completion, RolloutRequest
from dovetail.rollouts.agent_loops import running_episodes
from dovetail.rollouts.rollout_pool import RolloutPool
from dovetail.run.conversation import EpisodeConversation, RenderedConversation
from dovetail.run.data import read_tokenizer
from dovetail.run.inference import find_model, serving

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


class Watched:
    """A pool that keeps the prompts of its requests."""

    def __init__(self, pool: RolloutPool) -> None:
        self.pool = pool
        self.prompts: list[list[int]] = []

    def submit(
        self, request: RolloutRequest, conversation: Hashable = None
    ) -> AsyncGenerator[Completion, None]:
        self.prompts.append(request.prompt_ids.tolist())
        return self.pool.submit(request, conversation)

    def end_conversation(self, conversation: Hashable) -> None:
        self.pool.end_conversation(conversation)


def test_each_turn_sees_those_before(tiny: Path) -> None:
    source = find_model(str(tiny))
    config = source.load_config(None, OPTIONS).config
    tokenizer = read_tokenizer(config)
    with serving(config, config.model, tokenizer) as (pool, _):
        watched: Any = Watched(pool)
        talk = RenderedConversation(config, tokenizer)
        answers = [asyncio.run(talk.reply(watched, text)) for text in ("hello", "and now?")]
    turns = ["hello", answers[0], "and now?"]
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
    for count, prompt in zip((1, 3), watched.prompts, strict=True):
        wanted = tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(prompt) == wanted


def test_an_answer_of_an_agent_loop_continues_the_tokens_of_those_before(
    tiny_with_tools: Path, tool_loop: str
) -> None:
    source = find_model(str(tiny_with_tools))
    options = ("data.max_response_length=400", *OPTIONS[1:], f"rollout.agent_loop={tool_loop}")
    config = source.load_config(None, options).config
    tokenizer = read_tokenizer(config)
    with (
        serving(config, config.model, tokenizer) as (pool, context),
        running_episodes(config, context, context.logger) as episodes,
        asyncio.Runner() as runner,
    ):
        assert episodes is not None
        watched: Any = Watched(pool)
        talk = EpisodeConversation(config, tokenizer, episodes)
        shown = [runner.run(talk.reply(watched, text)) for text in ("hello", "and now?", "well?")]
    assert len(watched.prompts) == 6  # two turns an answer
    for before, after in pairwise(watched.prompts):
        assert after[: len(before)] == before
        assert len(after) > len(before)
    whole = tokenizer.decode(watched.prompts[-1])
    assert whole.count("<tool_response>\n42\n</tool_response>") == 5
    assert whole.index("hello") < whole.index("and now?") < whole.index("well?")
    assert whole.endswith("<|im_start|>assistant\n")
    for text in shown:
        assert '[call] calculator({"expression": "6*7"})\n[tool] 42\n' in text
        assert text.endswith("[ended at the limit on turns]")


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
