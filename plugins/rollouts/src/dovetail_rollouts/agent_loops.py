"""The agent loop of a run: it is made from the config, and its chat template is tried before anything is generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces import AgentLoop, Logger, PluginContext, Tokenizer
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import EpisodeSection, PluginSection, RunConfig
from dovetail_rollouts.episodes import Episodes
from dovetail_rollouts.template_transitions import (
    CHOICES,
    OTHER_TEMPLATE,
    history_changes,
    not_rendered,
    observed_transitions,
)
from dovetail_rollouts.turn_encoder import TurnEncoder

_KEY = "rollout.agent_loop"


@contextmanager
def running_episodes(
    config: RunConfig, context: PluginContext, logger: Logger
) -> Iterator[Episodes | None]:
    """Start the agent loop of a config, and close it after the block; None where a sample is one response to the prompt.

    Raises:
        ConfigError: the chat template does not render what the loop observes, or changes earlier turns where that is refused.
    """
    with _started(config, context) as loop:
        if loop.one_response:
            yield None
            return
        tools = loop.chat_tools()
        _check_template(loop, TurnEncoder(context.tokenizer, tools), logger)
        yield Episodes(loop, context.tokenizer, tools, config.data.control_tokens)


def chat_tools(config: RunConfig, tokenizer: Tokenizer) -> Sequence[Mapping[str, Any]] | None:
    """Return the functions that the chat template describes in every prompt; None where a sample is one response to the prompt."""
    context = PluginContext(seed=config.seed, tokenizer=tokenizer, model=config.model)
    with _started(config, context) as loop:
        return None if loop.one_response else tuple(loop.chat_tools())


@contextmanager
def _started(config: RunConfig, context: PluginContext) -> Iterator[AgentLoop]:
    section = config.rollout.agent_loop or PluginSection(name="single_turn")
    loop: Any = make_plugin(ref_for("agent_loop", section), context)
    try:
        loop.start()
        yield loop
    finally:
        loop.close()


def _check_template(loop: AgentLoop, encoder: TurnEncoder, logger: Logger) -> None:
    """Try what the loop observes under the chat template.

    Raises:
        ConfigError: the template does not render it, or changes earlier turns, and the config refuses that.
    """
    found = observed_transitions(encoder, loop.transitions)
    if missing := not_rendered(found, loop.transitions):
        raise ConfigError(
            f"the chat template does not render what agent loop {loop.name!r} observes: {missing}",
            hint=OTHER_TEMPLATE,
        )
    if not (what := history_changes(found)):
        return
    chosen = loop.config.on_history_change if isinstance(loop.config, EpisodeSection) else "keep"
    if chosen == "refuse":
        raise ConfigError(
            f"{what}; {_KEY}.on_history_change=refuse",
            hint=f"set {_KEY}.on_history_change=keep, by which the policy sees its turns as it produced them; "
            "or fork, by which a further sequence begins with the conversation rendered anew; or set model.chat_template to a template that keeps them",
        )
    logger.info(f"{what}. {CHOICES[chosen]} ({_KEY}.on_history_change={chosen})")
