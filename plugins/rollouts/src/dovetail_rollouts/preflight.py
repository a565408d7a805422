"""Rules about rollouts: unused keys, a metric that validation does not report, and chat templates that change earlier turns or do not end
a response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs

from dovetail.errors import ModelError, nearest
from dovetail.interfaces import Finding
from dovetail.planning import Plan, generates, selected
from dovetail.sections import EpisodeSection, RunConfig
from dovetail_datasets import model_directory, text_config

_FIGURE = re.compile(r"val/(?:(?P<source>.+)/)?(?P<figure>[a-z]+@\d+)(?:/(?:low|high))?")
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
    """Warn if the chat template renders earlier turns differently once later turns follow, for example by leaving out their reasoning.

    A server that renders the whole conversation again then shows the policy other tokens than in training. The warning names the turns
    and the setting of `rollout.agent_loop.on_history_change`: `keep` or `fork`; with `refuse` it is an error. A template that does not
    render the agent loop's observations, such as results of tools, is an error too. The template is tried with a stand-in tool, since
    the loop's own tools are not started. Models that are not on this machine are not checked.
    """
    from dovetail_datasets import load_tokenizer
    from dovetail_rollouts.template_transitions import (
        CHOICES,
        OTHER_TEMPLATE,
        history_changes,
        not_rendered,
        observed_transitions,
    )
    from dovetail_rollouts.turn_encoder import TurnEncoder

    loop, section = selected("agent_loop", config.rollout.agent_loop), config.model
    home = model_directory(section.tokenizer_path or section.path, section)
    if loop is None or not loop.cls.transitions or home is None or not generates(config):
        return
    try:
        tokenizer = load_tokenizer(attrs.evolve(section, path=str(home), tokenizer_path=None))
    except ModelError:
        return  # other rules report the error
    observed = loop.cls.transitions
    encoder = TurnEncoder(tokenizer, () if observed == {"user"} else (_TOOL,))
    found = observed_transitions(encoder, observed)
    if missing := not_rendered(found, observed):
        yield Finding.error(
            f"the chat template does not render the messages that agent loop {loop.name!r} adds between turns: {missing}",
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
        hint=f"if you don't want this, set rollout.agent_loop.on_history_change={others}, or model.chat_template to a "
        "template that keeps earlier turns",
    )


def turn_end_not_stopped(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the chat template ends an assistant's turn with a token at which generation does not stop.

    Responses would then continue after their end. Warn also if `rollout.stop_token_ids` names a token that the model does not have.

    Every engine stops at the end tokens of the tokenizer, config.json and generation_config.json, at `rollout.stop_token_ids`
    and at `rollout.stop`; it is enough if one of these has the token. Templates that end a turn with plain text are not
    checked, since the files don't tell whether the model writes that text or an end token: set `rollout.stop` to such text.
    Models that are not on this machine are not checked either.
    """
    from dovetail_datasets import ModelFacts, load_tokenizer, message_form

    section, rollout = config.model, config.rollout
    given = section.tokenizer_path or section.path
    home, policy = model_directory(given, section), model_directory(section.path, section)
    raw = config.data.plain_prompts == "raw"
    if home is None or policy is None or raw or rollout.ignore_eos or not generates(config):
        return
    if text_config(policy, section) is None:
        return  # transformers would warn about the tokenizer of an unreadable model
    try:
        tokenizer = load_tokenizer(attrs.evolve(section, path=str(home), tokenizer_path=None))
        facts = ModelFacts.read(attrs.evolve(section, path=str(policy)), tokenizer, None)
    except ModelError:
        return  # other rules report the error
    if beyond := [n for n in rollout.stop_token_ids if not 0 <= n < facts.vocab_size]:
        yield Finding.warning(
            f"rollout.stop_token_ids = {list(rollout.stop_token_ids)}: the model has only the token ids 0 to {facts.vocab_size - 1}, so "
            f"no response ends with {beyond}",
            hint="set rollout.stop_token_ids to ids of the model's tokenizer",
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
            f"generation does not stop: the tokenizer and the two files config.json and generation_config.json in {policy} name "
            f"{known or 'no token'} as eos_token_id, and rollout.stop_token_ids lacks {end}",
            hint=f"set rollout.stop_token_ids=[{end}], or correct eos_token_id in generation_config.json",
        )


def partial_rollout_unused(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if `rollout.partial_rollout` or `rollout.keep_cache` has no effect.

    `partial_rollout` has no effect if the trainer does not generate ahead, since no response is then interrupted. `keep_cache` has no
    effect without `partial_rollout`.
    """
    if plan is None or not plan.generates:
        return
    if config.rollout.partial_rollout and not plan.facts.age:
        yield Finding.warning(
            f"rollout.partial_rollout=true has no effect: trainer {plan.refs['trainer'].name} waits for all responses "
            "of a step before it updates",
            hint="choose a trainer that generates ahead, such as streaming, or set rollout.partial_rollout=false",
        )
    if config.rollout.keep_cache and not config.rollout.partial_rollout:
        yield Finding.warning(
            "rollout.keep_cache=true has no effect: with rollout.partial_rollout=false responses end before weights are sent",
            hint="set trainer={name: streaming, on_sync: keep}, or rollout.keep_cache=false",
        )


def offload_frees_nothing(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the config lets the rollout sleep between steps, but the rollout runs on CPUs, where sleeping engines free no memory."""
    if plan is None or not config.rollout.offload or config.rollout.joined:
        return
    if not plan.generates:
        return
    if plan.device_of("rollout") == "cpu":
        yield Finding.warning(
            "rollout.offload = true, but the rollout runs on the CPU, where offloading frees no memory and takes time",
            hint="set rollout.offload=false: offloading is for accelerators that trainer and rollout share",
        )


def best_metric_unknown(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if `trainer.best_metric` names a metric that validation never reports: no checkpoint would be the best."""
    # Imported here, since the module loads NumPy and more, which the other rules don't need.
    from dovetail_rollouts.validation import BESIDES, figure_names, metric_names

    metric, n = config.trainer.best_metric, config.rollout.validation.n
    if metric is None:
        return
    if not config.data.val_files:
        yield Finding.error(
            f"trainer.best_metric = {metric}, but nothing is validated: data.val_files names no file",
            hint="set data.val_files, or trainer.best_metric=null",
        )
        return
    if not generates(config):
        return  # validation reports the objective's metrics
    match = _FIGURE.fullmatch(metric)
    # Data sources are known only once the data has been read, so any name is accepted as a data source.
    if metric in BESIDES or (match is not None and match["figure"] in figure_names(n)):
        return
    source = match["source"] if match is not None else None
    known = metric_names(n, [source] if source else [])
    close = nearest(metric, known)
    yield Finding.error(
        f"trainer.best_metric = {metric} is not a metric of validation at rollout.validation.n = {n}; there are "
        f"{', '.join(f'val/{name}' for name in figure_names(n))}, and the same for each data source "
        "(val/<data_source>/…)",
        hint=f"set trainer.best_metric={close or f'val/mean@{n}'}",
    )
