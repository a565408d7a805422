"""`dovetail chat MODEL`: a conversation with a model in a terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from dovetail.cli import render
from dovetail.text import encodable


@click.command()
@click.argument("model", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", type=click.Path(path_type=Path), help="Instead of the run's own config.")
def chat(model: str, overrides: tuple[str, ...], config: Path | None) -> None:
    """Talk with MODEL; each answer is shown when it is complete. Ctrl-D ends the conversation.

    Under an agent loop, each answer is an episode, shown with its turns, tool calls and observations.
    MODEL and overrides are as for `dovetail generate`, such as rollout.temperature=0.7 or data.max_response_length=512.
    """
    from dovetail_datasets import read_tokenizer
    from dovetail_inference.conversation import (
        Conversation,
        EpisodeConversation,
        RenderedConversation,
    )
    from dovetail_inference.models import find_model, serving
    from dovetail_rollouts import running_episodes

    source = find_model(model)
    settings = source.load_config(config, overrides).config
    tokenizer = read_tokenizer(settings)
    # One event loop for all answers, since the state of an agent loop may be bound to its event loop.
    with (
        source.on_disk(settings) as section,
        serving(settings, section, tokenizer) as (pool, context),
        running_episodes(settings, context, context.logger) as episodes,
        asyncio.Runner() as runner,
    ):
        conversation: Conversation = (
            RenderedConversation(settings, tokenizer)
            if episodes is None
            else EpisodeConversation(settings, tokenizer, episodes)
        )
        while (text := _asked()) is not None:
            if text.strip():
                render.line(runner.run(conversation.reply(pool, text)))


def _asked() -> str | None:
    """Return what the user typed; None at the end of the input."""
    try:
        return str(encodable(input("> ")))
    except EOFError:
        render.line()
        return None
