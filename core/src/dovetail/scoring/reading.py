"""What a reward model reads: a conversation as the tokens that its chat template makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.data.message_form import conversation_texts
from dovetail.interfaces.plugin import Tokenizer


def conversation_ids(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], response: str
) -> list[int]:
    """Return the tokens of a prompt and a response, of which the last is where a reward model is read, and was trained.

    Args:
        tokenizer: the model's own, with a chat template.
        prompt: messages, or the text of a user's one.
        response: what the assistant answers.

    Raises:
        Exception: what the template raises.
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    turns = [*asked, {"role": "assistant", "content": response}]
    (text,) = conversation_texts(tokenizer, [(turns, None)])
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
