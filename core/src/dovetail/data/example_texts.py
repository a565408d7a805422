"""The text and the token ids of examples: what the chat template, or a plain text, makes of each answer with its prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs

from dovetail.data.end_of_turn import TurnEnds
from dovetail.data.example_rows import ASSISTANT, RawExample, Turns
from dovetail.data.generation_blocks import joined, render, template_with_blocks
from dovetail.data.message_form import conversation_texts, message_form
from dovetail.errors import DataError
from dovetail.interfaces.plugin import Tokenizer

Parts = list[list[int]]
"""Token ids of a text, in parts: the prompt; what is trained on; what is not, and what is, in turn."""


@attrs.frozen
class AnswerText:
    """An answer with its prompt."""

    text: str
    cuts: tuple[int, ...]
    """Where its parts begin, without the first; see `Parts`."""

    @property
    def parts(self) -> list[str]:
        return [self.text[a:b] for a, b in pairwise((0, *self.cuts, len(self.text)))]


def tokenised(
    tokenizer: Tokenizer, examples: Sequence[RawExample], ends: TurnEnds | None = None
) -> list[list[Parts]]:
    """Return the parts of every example's answers, each with its prompt; see `texts_of`."""
    parts = iter(encode(tokenizer, texts_of(tokenizer, examples, ends)) if examples else ())
    return [[next(parts) for _ in example.responses] for example in examples]


def texts_of(
    tokenizer: Tokenizer, examples: Sequence[RawExample], ends: TurnEnds | None = None
) -> list[AnswerText]:
    """Return the text of every answer with its prompt; errors as of `load_examples`.

    Args:
        tokenizer: with a chat template, unless all examples are texts.
        examples: rows.
        ends: of the tokenizer's template; those that the tokenizer alone gives where absent.
    """
    conversations = [each for example in examples for each in conversations_of(example)]
    texts = templated(tokenizer, conversations, ends or TurnEnds(tokenizer))
    return [
        _plain(tokenizer, example.prompt, response)
        if isinstance(example.prompt, str)
        else next(texts)
        for example in examples
        for response in example.responses
    ]


def _plain(tokenizer: Tokenizer, prompt: str, response: Any) -> AnswerText:
    """A text as it stands, between the tokenizer's beginning of sequence, where it writes one, and its end of sequence."""
    bos, eos = (getattr(tokenizer, name, None) or "" for name in ("bos_token", "eos_token"))
    writes = bos and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if writes and not prompt.startswith(bos):
        prompt = bos + prompt
    return AnswerText(prompt + response + eos, (len(prompt),))


@attrs.frozen
class TrainedConversation:
    """A conversation up to the last turn that is trained on."""

    messages: Turns
    trained: Sequence[int] = ()
    """Places of the turns that are trained on."""
    tools: Any = None


def conversations_of(example: RawExample) -> list[TrainedConversation]:
    """Return the conversations that end in an example's answers; none of texts without a chat template."""
    found = []
    for response in example.responses:
        if not isinstance(example.prompt, str) and not isinstance(response, str):
            places = example.trained(response)
            messages = [*example.prompt, *response][: places[-1] + 1]
            found.append(TrainedConversation(messages, places, example.tools))
    return found


def templated(
    tokenizer: Tokenizer, conversations: Sequence[TrainedConversation], ends: TurnEnds
) -> Iterator[AnswerText]:
    """Yield the text of each conversation: by the template's `{% generation %}` blocks, else by the prefix method."""
    templates = [template_with_blocks(tokenizer, each.tools) for each in conversations]
    pairs = list(zip(conversations, templates, strict=True))
    by_prefix = _by_prefix(tokenizer, [each for each, template in pairs if template is None], ends)
    for each, template in pairs:
        yield next(by_prefix) if template is None else _by_blocks(tokenizer, template, each)


def _by_blocks(
    tokenizer: Tokenizer, template: str, conversation: TrainedConversation
) -> AnswerText:
    """What the template's blocks mark of the turns that are trained on.

    Raises:
        DataError: they mark nothing, or it is not known which of a conversation's turns a block marks.
    """
    messages = message_form(tokenizer, conversation.tools).taken(conversation.messages)
    text, spans = render(tokenizer, template, messages, conversation.tools)
    turns = [i for i, turn in enumerate(conversation.messages) if turn["role"] == ASSISTANT]
    if not spans:
        raise DataError(
            f"the chat template's {{% generation %}} blocks mark nothing, and the conversation has {len(turns)} turns of the assistant's",
            hint="set model.chat_template to one that marks every answer, or to one without such blocks",
        )
    # A turn in several blocks, one after the other, is one.
    spans = spans if len(spans) == len(turns) else joined(spans)
    if len(conversation.trained) < len(turns):
        if len(spans) != len(turns):
            raise DataError(
                f"the chat template's {{% generation %}} blocks mark {len(spans)} parts of a conversation with {len(turns)} turns of the "
                f"assistant's, of which {len(conversation.trained)} are trained on: which part belongs to which turn is not known",
                hint="train on all turns, or set model.chat_template to one that marks every answer once",
            )
        spans = [s for place, s in zip(turns, spans, strict=True) if place in conversation.trained]
    cuts = [cut for span in joined(spans) for cut in span]
    return AnswerText(text[: cuts[-1]], tuple(cuts[:-1]))


def _by_prefix(
    tokenizer: Tokenizer, conversations: Sequence[TrainedConversation], ends: TurnEnds
) -> Iterator[AnswerText]:
    """A turn is what it adds to the text of the messages before it, up to its end of turn.

    Raises:
        DataError: the template writes earlier turns anew once a turn follows them.
    """
    turns = [(each, place) for each in conversations for place in each.trained]
    before, after = (
        conversation_texts(
            tokenizer,
            [(each.messages[: place + more], each.tools) for each, place in turns],
            generate=not more,
        )
        for more in (0, 1)
    )
    text, cuts = "", list[int]()
    for number, (each, place) in enumerate(turns):
        asked, answered = before[number], after[number]
        if not (asked.startswith(text) and answered.startswith(asked)):
            raise DataError(
                f"the chat template rewrites earlier turns: the text of the messages before message {place} is not the beginning "
                "of the text with it",
                hint="set data.trained_turns=last, or model.chat_template to a template that only ever appends or that marks "
                "answers with {% generation %}",
            )
        last = place == each.trained[-1]
        following = None if last else before[number + 1]
        calls = bool(each.messages[place].get("tool_calls"))
        text = ends.ended(answered, following, each.tools, calls=calls)
        cuts += [len(asked), len(text)]
        if last:
            yield AnswerText(text, tuple(cuts[:-1]))
            text, cuts = "", []


def encode(tokenizer: Tokenizer, texts: Sequence[AnswerText]) -> list[Parts]:
    """Return the token ids of every text's parts.

    A prompt has the ids that it has alone, as in generation. Where a token of the whole text would reach across a cut, the parts
    are tokenised one by one.
    """

    def ids(strings: list[str], **how: object) -> Any:
        return tokenizer(strings, add_special_tokens=False, **how)

    prompts = ids([text.text[: text.cuts[0]] for text in texts])["input_ids"]
    fast = bool(getattr(tokenizer, "is_fast", False))
    whole = ids([text.text for text in texts], return_offsets_mapping=True) if fast else None
    encoded = []
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        split = whole and _split(
            whole["input_ids"][number], whole["offset_mapping"][number], text.cuts
        )
        if not split or split[0] != prompt:
            split = [list(prompt), *ids(text.parts[1:])["input_ids"]]
        encoded.append(split)
    return encoded


def _split(ids: list[int], offsets: Sequence[tuple[int, int]], cuts: Sequence[int]) -> Parts | None:
    """The ids of each part; None where a token reaches across a cut."""
    starts = [start for start, _ in offsets]
    places = [bisect_left(starts, cut) for cut in cuts]
    if any(place and offsets[place - 1][1] > cut for place, cut in zip(places, cuts, strict=True)):
        return None
    return [ids[a:b] for a, b in pairwise((0, *places, len(ids)))]
