"""Rules about chat templates: earlier turns that they change, where a response ends, and what they leave out of rows."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from dovetail.data.model_facts import model_directory
from dovetail.errors import ModelError
from dovetail.interfaces.preflight import Finding
from dovetail.media.models import text_config
from dovetail.planning.lookup import generates, selected
from dovetail.planning.plan import Plan
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


def history_changes(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """The chat template renders earlier turns of an episode in another way once others follow, such as without their thinking; or it
    does not render what the agent loop observes, such as the results of tools, which is an error.

    What the policy is trained on is then not what a server shows it that renders the conversation anew. The warning names the turns, and
    what `rollout.agent_loop.on_history_change` does about them: `keep` or `fork`; under `refuse` it is an error. The template is tried with
    a tool in place of the loop's own, which are not started. Models that are not on this machine are not looked at.
    """
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
        yield Finding.error(
            f"the chat template does not render what agent loop {loop.name!r} observes: {missing}",
            hint=OTHER_TEMPLATE,
        )
    if not (what := history_changes(found)):
        return
    own = loop.config
    chosen = own.on_history_change if isinstance(own, EpisodeSection) else "keep"
    find = Finding.error if chosen == "refuse" else Finding.warning
    others = " or ".join(name for name in CHOICES if name not in (chosen, "refuse"))
    yield find(
        f"{what}. {CHOICES[chosen]} (rollout.agent_loop.on_history_change={chosen})",
        hint=f"where that is not what you want, set rollout.agent_loop.on_history_change={others}, or model.chat_template to a "
        "template that keeps earlier turns",
    )


def turn_end_not_stopped(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """The chat template ends an assistant's turn with a token at which generation does not stop, so that responses run on; or
    `rollout.stop_token_ids` names a token that the model does not have.

    Every engine stops at the end tokens of the tokenizer, of config.json and of generation_config.json together, at
    `rollout.stop_token_ids` and at `rollout.stop`: that these files differ does no harm as long as one of them names the
    token. Templates that end a turn with plain text, also a mark that the tokenizer splits into several tokens, are not
    judged: whether the model writes that text or an end token is not in these files. Set `rollout.stop` to such text.
    Nor are models that are not on this machine.
    """
    from dovetail.data.message_form import message_form
    from dovetail.data.model_facts import ModelFacts
    from dovetail.data.tokenizer import load_tokenizer

    section, rollout = config.model, config.rollout
    given = section.tokenizer_path or section.path
    home, policy = model_directory(given, section), model_directory(section.path, section)
    raw = config.data.plain_prompts == "raw"
    if home is None or policy is None or raw or rollout.ignore_eos or not generates(config):
        return
    if text_config(policy, section) is None:
        return  # transformers would warn about the tokenizer of such a model
    try:
        tokenizer = load_tokenizer(attrs.evolve(section, path=str(home), tokenizer_path=None))
        facts = ModelFacts.read(attrs.evolve(section, path=str(policy)), tokenizer, None)
    except ModelError:
        return  # other rules say what is wrong with it
    if beyond := [n for n in rollout.stop_token_ids if not 0 <= n < facts.vocab_size]:
        yield Finding.warning(
            f"rollout.stop_token_ids = {list(rollout.stop_token_ids)}: the model has the ids 0 to {facts.vocab_size - 1} alone, and "
            f"never ends a response with {beyond}",
            hint="set rollout.stop_token_ids= to ids of its tokenizer",
        )
    template = getattr(tokenizer, "chat_template", None)
    text = message_form(tokenizer).tail if template else None
    if not text or any(string in text for string in rollout.stop):
        return
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if {*facts.eos_token_ids, *rollout.stop_token_ids} & set(ids):
        return
    marks = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
    end = next((number for number in ids if number in marks), None)
    if end is not None:
        known = ", ".join(
            f"{tokenizer.convert_ids_to_tokens(n)!r} ({n})" for n in facts.eos_token_ids
        )
        yield Finding.warning(
            f"the chat template of {given} ends a turn with {tokenizer.convert_ids_to_tokens(end)!r} ({end}), at which "
            f"generation does not stop: neither the tokenizer nor {policy}/config.json or generation_config.json names it as "
            f"eos_token_id (they name {known or 'none'}), nor does rollout.stop_token_ids",
            hint=f"set rollout.stop_token_ids=[{end}], or correct eos_token_id in generation_config.json",
        )


def rows_left_out(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """The chat template leaves out some of what rows hold: texts of a role, thoughts, tool calls, or the end of turns that are trained on.

    Many templates skip what they do not know, such as messages of a role or a field of a message. A copy of a row of each kind is
    rendered with marks in place of its texts, and the marks are looked for. Thoughts of turns that are not trained on are not judged.
    """
    for what in plan.left_out if plan is not None else ():
        yield Finding.warning(
            what,
            hint="set model.chat_template to a template that writes it (in a {% generation %} block, where it has such blocks), or "
            "leave it out of the rows; thoughts may stand in the content, as <think>…</think>",
        )
