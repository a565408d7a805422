"""Renders examples as texts and token ids: each answer with its prompt, by the chat template or as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs

from dovetail.errors import DataError
from dovetail.interfaces import Tokenizer
from dovetail_datasets.encoding import Parts, TextEncoder, with_beginning
from dovetail_datasets.end_of_turn import TurnEnds
from dovetail_datasets.example_rows import ASSISTANT, RawExample, Turns
from dovetail_datasets.generation_blocks import joined, render, template_with_blocks

AnswerText = list[str]
"""The text of an answer with its prompt, in the same parts as `Parts`."""


def tokenised(
    encoder: TextEncoder, examples: Sequence[RawExample], ends: TurnEnds
) -> list[list[Parts]]:
    """Return the token ids of every example's answers, each with its prompt; see `texts_of`."""
    texts = texts_of(encoder, examples, ends)
    parts = iter(encoder.parts(texts) if texts else ())
    return [[next(parts) for _ in example.responses] for example in examples]


def texts_of(
    encoder: TextEncoder, examples: Sequence[RawExample], ends: TurnEnds
) -> list[AnswerText]:
    """Return the text of every answer with its prompt, to be encoded; for errors see `load_datasets`.

    Args:
        encoder: the encoder of a tokenizer with a chat template, unless all examples are texts.
        examples: the rows to render.
        ends: adds the end-of-turn tokens that the tokenizer's template lacks.
    """
    conversations = [each for example in examples for each in conversations_of(example)]
    texts = templated(encoder, conversations, ends)
    return [
        _plain(encoder.tokenizer, example.prompt, response)
        if isinstance(example.prompt, str)
        else next(texts)
        for example in examples
        for response in example.responses
    ]


def _plain(tokenizer: Tokenizer, prompt: str, response: Any) -> AnswerText:
    """Return a plain prompt and response as two parts: the beginning-of-sequence token, if the tokenizer adds one, precedes the prompt, and
    the end-of-sequence token follows the response.
    """
    prompt, eos = with_beginning(tokenizer, prompt), getattr(tokenizer, "eos_token", None) or ""
    return [prompt, response + eos]


@attrs.frozen
class TrainedConversation:
    """A conversation up to the last turn that is trained on."""

    messages: Turns
    trained: Sequence[int] = ()
    """Indices of the turns that are trained on."""
    tools: Any = None


def conversations_of(example: RawExample) -> list[TrainedConversation]:
    """Return one conversation for each answer of an example, with the answer at its end; empty if the example is plain texts."""
    found = []
    for response in example.responses:
        if not isinstance(example.prompt, str) and not isinstance(response, str):
            places = example.trained(response)
            messages = [*example.prompt, *response][: places[-1] + 1]
            found.append(TrainedConversation(messages, places, example.tools))
    return found


def templated(
    encoder: TextEncoder, conversations: Sequence[TrainedConversation], ends: TurnEnds
) -> Iterator[AnswerText]:
    """Yield the text of each conversation, split into parts by the template's `{% generation %}` blocks, or, without such blocks, by
    rendering the messages before and after each trained turn.
    """
    templates = [template_with_blocks(encoder.tokenizer, each.tools) for each in conversations]
    pairs = list(zip(conversations, templates, strict=True))
    by_prefix = _by_prefix(encoder, [each for each, template in pairs if template is None], ends)
    for each, template in pairs:
        yield next(by_prefix) if template is None else _by_blocks(encoder, template, each)


def _by_blocks(
    encoder: TextEncoder, template: str, conversation: TrainedConversation
) -> AnswerText:
    """Return the text of a conversation, split at the template's `{% generation %}` blocks of trained turns.

    Raises:
        DataError: the blocks mark nothing, or a block can't be assigned to a turn.
    """
    messages = encoder.messages(conversation.messages, conversation.tools)
    tools = encoder.given(conversation.tools)
    text, spans = render(encoder.tokenizer, template, messages, tools)
    turns = [i for i, turn in enumerate(conversation.messages) if turn["role"] == ASSISTANT]
    if not spans:
        raise DataError(
            f"the chat template's {{% generation %}} blocks mark no text; expected the text of {len(turns)} assistant turn(s)",
            hint="set model.chat_template to a template that marks every assistant turn, or to a template without such blocks",
        )
    # A template may write one turn as several adjacent blocks.
    spans = spans if len(spans) == len(turns) else joined(spans)
    if len(conversation.trained) < len(turns):
        if len(spans) != len(turns):
            raise DataError(
                f"the chat template's {{% generation %}} blocks mark {len(spans)} part(s) of a conversation with {len(turns)} assistant turns; "
                f"expected one part for each turn, to find the {len(conversation.trained)} turn(s) that should be trained on",
                hint="train on all turns, or set model.chat_template to a template that marks every assistant turn once",
            )
        spans = [s for place, s in zip(turns, spans, strict=True) if place in conversation.trained]
    cuts = [cut for span in joined(spans) for cut in span]
    return [text[a:b] for a, b in pairwise((0, *cuts))]


def _by_prefix(
    encoder: TextEncoder, conversations: Sequence[TrainedConversation], ends: TurnEnds
) -> Iterator[AnswerText]:
    """Yield the text of each conversation in parts. A trained turn is the text that it adds to the text of the messages before it.

    Raises:
        DataError: the template changes the text of earlier turns if another turn follows.
    """
    turns = [(each, place) for each in conversations for place in each.trained]
    before, after = (
        encoder.texts(
            [(each.messages[: place + more], each.tools) for each, place in turns],
            generate=not more,
        )
        for more in (0, 1)
    )
    text, parts = "", AnswerText()
    for number, (each, place) in enumerate(turns):
        asked, answered = before[number], after[number]
        if not (asked.startswith(text) and answered.startswith(asked)):
            raise DataError(
                f"the chat template rewrites earlier turns: the text rendered without message {place} is not the beginning "
                "of the text rendered with it",
                hint="set data.trained_turns=last, or set model.chat_template to a template that only appends text, or that marks "
                "assistant turns with {% generation %}",
            )
        last = place == each.trained[-1]
        following = None if last else before[number + 1]
        calls = bool(each.messages[place].get("tool_calls"))
        ended = ends.ended(answered, following, each.tools, calls=calls)
        parts += [asked[len(text) :], ended[len(asked) :]]
        text = ended
        if last:
            yield parts
            text, parts = "", []
