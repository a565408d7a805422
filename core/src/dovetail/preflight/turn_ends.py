"""A rule about the end of a response: generation is to stop where the chat template ends an assistant's turn."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces.plugin import Tokenizer
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.preflight.models import model_directory, text_config
from dovetail.preflight.selected import generates
from dovetail.sections import RunConfig

_ANSWER = "forty-two"


class TurnEndNotStopped(PreflightRule):
    """The chat template ends an assistant's turn with a token at which generation does not stop, so that responses run on.

    Every engine stops at the end tokens of the tokenizer, of config.json and of generation_config.json together, at
    `rollout.stop_token_ids` and at `rollout.stop`: that these files differ does no harm as long as one of them names the
    token. Templates that end a turn with plain text, also a mark that the tokenizer splits into several tokens, are not
    judged: whether the model writes that text or an end token is not in these files. Set `rollout.stop` to such text.
    Nor are models that are not on this machine.
    """

    name = "turn_end_not_stopped"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.data.tokenizer import load_tokenizer
        from dovetail.serving.facts import ModelFacts

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
        if not (text := _turn_end(tokenizer)) or any(string in text for string in rollout.stop):
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
            yield self.warning(
                f"the chat template of {given} ends a turn with {tokenizer.convert_ids_to_tokens(end)!r} ({end}), at which "
                f"generation does not stop: neither the tokenizer nor {policy}/config.json or generation_config.json names it as "
                f"eos_token_id (they name {known or 'none'}), nor does rollout.stop_token_ids",
                hint=f"set rollout.stop_token_ids=[{end}], or correct eos_token_id in generation_config.json",
            )


def _turn_end(tokenizer: Tokenizer) -> str:
    """What the chat template writes after an assistant's last message; empty where it can't be told."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # noqa: BLE001 - a template raises what it likes, and the data's own rows are tried elsewhere
        return ""
    return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
