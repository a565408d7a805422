"""The input of a reward model: a conversation, tokenized with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail_datasets import TextEncoder


def conversation_ids(
    encoder: TextEncoder, prompt: str | Sequence[Mapping[str, Any]], response: str
) -> list[int]:
    """Return the tokens of a prompt and a response; a reward model's score is read at the last token.

    Args:
        encoder: the encoder of the model's own tokenizer, with a chat template.
        prompt: messages, or the text of a single user message.
        response: the assistant's answer.

    Raises:
        Exception: an error of the chat template.
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    turns = [*asked, {"role": "assistant", "content": response}]
    (found,) = encoder.encodings(encoder.texts([(turns, None)]), verbose=False)
    return list(found["input_ids"])
