"""A rule about chat templates that change earlier turns of an episode."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.preflight.models import model_directory
from dovetail.preflight.selected import generates, selected
from dovetail.sections import EpisodeSection, RunConfig

_TOOL = {
    "type": "function",
    "function": {
        "name": "tool_0",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "integer", "description": "A number."}},
            "required": ["value"],
        },
    },
}


class HistoryChanges(PreflightRule):
    """The chat template renders earlier turns of an episode in another way once others follow, such as without their thinking; or it
    does not render what the agent loop observes, such as the results of tools, which is an error.

    What the policy is trained on is then not what a server shows it that renders the conversation anew. The warning names the turns, and
    what `rollout.agent_loop.on_history_change` does about them: `keep` or `fork`; under `refuse` it is an error. The template is tried with
    a tool in place of the loop's own, which are not started. Models that are not on this machine are not looked at.
    """

    name = "history_changes"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.data.template_transitions import (
            CHOICES,
            OTHER_TEMPLATE,
            history_changes,
            not_rendered,
            observed_transitions,
        )
        from dovetail.data.tokenizer import load_tokenizer
        from dovetail.data.turn_encoder import TurnEncoder

        loop, section = selected("agent_loop", config.rollout.agent_loop), config.model
        home = model_directory(section.tokenizer_path or section.path, section)
        if loop is None or not loop.cls.transitions or home is None or not generates(config):
            return
        try:
            tokenizer = load_tokenizer(attrs.evolve(section, path=str(home), tokenizer_path=None))
        except ModelError:
            return  # other rules say what is wrong with it
        observed = loop.cls.transitions
        encoder = TurnEncoder(tokenizer, () if observed == {"user"} else (_TOOL,))
        found = observed_transitions(encoder, observed)
        if missing := not_rendered(found, observed):
            yield self.error(
                f"the chat template does not render what agent loop {loop.name!r} observes: {missing}",
                hint=OTHER_TEMPLATE,
            )
        if not (what := history_changes(found)):
            return
        own = loop.config
        chosen = own.on_history_change if isinstance(own, EpisodeSection) else "keep"
        find = self.error if chosen == "refuse" else self.warning
        others = " or ".join(name for name in CHOICES if name not in (chosen, "refuse"))
        yield find(
            f"{what}. {CHOICES[chosen]} (rollout.agent_loop.on_history_change={chosen})",
            hint=f"where that is not what you want, set rollout.agent_loop.on_history_change={others}, or model.chat_template to a "
            "template that keeps earlier turns",
        )
