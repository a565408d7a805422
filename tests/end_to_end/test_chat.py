"""A conversation continues the tokens of its answers, with an agent loop and without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.interfaces.rollout import Completion, RolloutRequest
from dovetail_datasets.loading import read_tokenizer
from dovetail_inference.conversation import EpisodeConversation, RenderedConversation
from dovetail_inference.models import find_model, serving
from dovetail_rollouts import RolloutPool, running_episodes

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
