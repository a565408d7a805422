"""Closing: the tokens after a response, for models that are trained at the response's end."""

from __future__ import annotations

from itertools import takewhile

import attrs

from dovetail.errors import ConfigError
from dovetail.interfaces import PlanFacts, Tokenizer
from dovetail_datasets.encoding import TextEncoder
from dovetail_datasets.end_of_turn import TurnEnds
from dovetail_datasets.example_texts import TrainedConversation, templated
from dovetail_datasets.generation_blocks import template_with_blocks
from dovetail_datasets.tokenizer import stop_tokens


@attrs.frozen(eq=False)
class Closing:
    """The tokens after a response, for objectives that train a model only at the response's end, such as a reward model's."""

    tail: tuple[int, ...]
    """Tokens that the chat template writes after a response that is trained on."""
    added: int
    """Number of tokens at the end of a trained response that its template did not write, such as the end-of-turn token of `TurnEnds`."""
    token: int
    """The token that is appended to the response, and at which the model is trained: its output at this token rates all text before it.
    """

    @classmethod
    def of(cls, facts: PlanFacts, tokenizer: Tokenizer) -> Closing | None:
        """Return the closing tokens that the run's objectives need; None if the objectives train at every token.

        Raises:
            ConfigError: some objectives train at every token, and others only at the end.
        """
        places = {
            plugin.cls.trained_at: plugin.title
            for path, plugin in facts.plugins.items()
            if plugin.ref.kind == "objective" and path != "critic.objective"
        }
        if len(places) > 1:
            raise ConfigError(
                f"{places['end']} trains only at the end of a response, but {places['tokens']} trains at every token; one run can't do both",
                hint="train the two objectives in separate runs",
            )
        if "end" not in places:
            return None
        trained, whole, encoder = "", "", TextEncoder(tokenizer)
        if getattr(tokenizer, "chat_template", None):
            turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
            # Rewards read the model's score at the end of the text that `dovetail_rollouts.conversation_ids` makes of a conversation.
            (whole,) = encoder.texts([(turns, None)])
            ends = TurnEnds(tokenizer, lambda: stop_tokens(facts.config.model, tokenizer))
            if template_with_blocks(tokenizer, None):
                (text,) = templated(encoder, [TrainedConversation(turns, [1])], ends)
                trained = "".join(text)
            else:
                trained = ends.ended(whole, None, None, calls=False)
        both = zip(trained, whole, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        added, tail = encoder.ids([rest[common:] for rest in (trained, whole)])
        return cls(tail=tuple(tail), added=len(added), token=tokenizer.eos_token_id or 0)
