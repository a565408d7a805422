"""Rows to examples: conversations and preference pairs as token ids, with a mask on what is trained on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np

from dovetail.data.example_rows import (
    ASSISTANT,
    Example,
    RawExample,
    TrainedResponse,
    Turns,
    row_parser,
)
from dovetail.data.generation_blocks import check_blocks, joined, render, template_with_blocks
from dovetail.data.image_prompts import ImageRenderer
from dovetail.data.images import FoundImage
from dovetail.data.prompts import (
    ROWS_AT_ONCE,
    PromptSet,
    check_template,
    check_template_args,
    in_batches,
    read_rows,
    too_long,
)
from dovetail.data.rows import folder_of, where
from dovetail.errors import DataError
from dovetail.interfaces.data import DatasetSource
from dovetail.interfaces.plugin import Tokenizer
from dovetail.interfaces.trainer import Examples
from dovetail.sections import DataSection, ModelSection

_PROMPT, _RESPONSE = "data.max_prompt_length", "data.max_response_length"


def load_examples(
    source: DatasetSource,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    section: DataSection,
    model: ModelSection,
    kind: Examples,
    media_dir: Path | None = None,
) -> PromptSet:
    """Read, check, template and tokenise every row.

    Args:
        source: reads the files.
        paths: files or patterns.
        tokenizer: a Hugging Face tokenizer.
        section: the limits and what happens beyond them, the prompt's column, plain prompts.
        model: for messages.
        kind: `conversations`, `preferences` or `unpaired_preferences`.
        media_dir: see `load_prompts`.

    Returns:
        Examples, as its prompts.

    Raises:
        DataError: a file, column, row or image is bad, the chat template writes earlier turns anew, an example is too long where that
            is refused, or none is left; or the template's blocks mark nothing.
        ModelError: messages are to be templated, and the tokenizer has no chat template; or rows have images, and the model
            takes none.
        ConfigError: the chat template has arguments, and raw texts do not go through it; or what it marks can't be found.
    """
    rows = read_rows(source, paths)
    make = ExampleMaker(rows, paths, tokenizer, section, model, kind, media_dir)
    made = make(
        [
            NumberedRow(index, row, where(rows, index), folder_of(rows, index))
            for index, row in enumerate(rows)
        ]
    )
    examples = [example for example in made if example is not None]
    overlong = len(made) - len(examples)
    if not examples:
        raise DataError(
            f"all {overlong} {kind} of {', '.join(paths)} were filtered out: they are longer than "
            f"{_PROMPT}={section.max_prompt_length} or {_RESPONSE}={section.max_response_length} tokens",
            hint=f"raise {_PROMPT} or {_RESPONSE}",
        )
    return PromptSet(prompts=tuple(examples), filtered_overlong=overlong)


class NumberedRow(NamedTuple):
    """A row of a dataset."""

    number: int
    columns: Mapping[str, Any]
    where: str
    """File and row, for messages."""
    folder: str | None
    """That relative paths count from."""


class ExampleMaker:
    """Checks, templates and tokenises rows.

    Args:
        rows: of all files, or the first ones; they tell which columns there are.
        paths: of the files.
        tokenizer: see `load_examples`, as for the following.
        section: limits, and how rows are read.
        model: for messages.
        kind: of example.
        media_dir: see `load_prompts`.

    Raises:
        DataError: a file lacks a column.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        paths: Sequence[str],
        tokenizer: Tokenizer,
        section: DataSection,
        model: ModelSection,
        kind: Examples,
        media_dir: Path | None = None,
    ) -> None:
        self._media_dir = media_dir or Path(section.media_dir or "media")
        self._images: ImageRenderer | None = None
        self.text_alone = False
        """Whether rows with images are refused."""
        self._parse = row_parser(rows, kind, section, paths)
        self._tokenizer, self._section, self._model = tokenizer, section, model
        self._checked = False

    def __call__(self, rows: Sequence[NumberedRow]) -> list[Example | None]:
        """Return an example for each row, or None where it is too long and such rows are left out; errors as of `load_examples`."""
        parsed = [self._parse(row.columns, row.where, row.folder) for row in rows]
        self._check_template(parsed)
        # Of images, whose bytes are large, one by one.
        at_once = 1 if any(example.images for example in parsed) else ROWS_AT_ONCE
        made: list[Example | None] = []
        for place, (answers, images) in in_batches(
            self._render, parsed, lambda i: rows[i].where, at_once
        ):
            example = _example(rows[place], parsed[place], answers)
            if images:
                example = attrs.evolve(example, answers=tuple(map(self._marked, example.answers)))
            beyond = _beyond(example, self._section)
            if beyond and self._section.overlong_prompts == "error":
                raise too_long(rows[place].where, *beyond, self._image_tokens(example, beyond[0]))
            if not beyond and images:
                media = tuple(image.kept(self._media_dir) for image in images)
                example = attrs.evolve(example, media=media)
            made.append(None if beyond else example)
        return made

    def _render(
        self, examples: Sequence[RawExample]
    ) -> list[tuple[list[Parts], tuple[FoundImage, ...]]]:
        """The parts of every example's answers, each with its prompt; and the images."""
        texts = iter(_tokenised(self._tokenizer, [e for e in examples if not e.images]))
        return [self._render_with_images(e) if e.images else (next(texts), ()) for e in examples]

    def _render_with_images(
        self, example: RawExample
    ) -> tuple[list[Parts], tuple[FoundImage, ...]]:
        if self.text_alone:
            raise DataError(
                "it has images, and none of the first rows has, for which the engines were checked",
                hint="put a row with images first, or set data.streaming=false",
            )
        if self._images is None:
            self._images = ImageRenderer(self._tokenizer, self._section, self._model)
            check_blocks(self._images.tokenizer, of=repr(self._model.path))
        if isinstance(example.prompt, str):
            example = attrs.evolve(example, prompt=self._images.raw(example.prompt))
        texts = _texts(self._images.tokenizer, [example])
        return self._images.expanded(
            _encoded(self._images.tokenizer, texts),
            texts[0].parts[0],
            example.images,
            example.folder,
        )

    def _marked(self, answer: TrainedResponse) -> TrainedResponse:
        """An answer of an example with images, with the mask of its own ones."""
        assert self._images is not None
        stands_T = (answer.ids == self._images.image_token) & ~answer.mask
        return attrs.evolve(answer, image_mask=stands_T) if stands_T.any() else answer

    def _image_tokens(self, example: Example, part: str) -> int:
        """How many tokens of the prompt, or of the longest response, stand for images."""
        if self._images is None:
            return 0
        if part == "prompt":
            return int((example.prompt_ids == self._images.image_token).sum())
        longest = max(example.answers, key=lambda answer: len(answer.ids))
        return 0 if longest.image_mask is None else int(longest.image_mask.sum())

    def _check_template(self, parsed: Sequence[RawExample]) -> None:
        if any(isinstance(example.prompt, str) for example in parsed):
            check_template_args(self._section)
        templated = (e for e in parsed if not isinstance(e.prompt, str) and not e.images)
        if not self._checked and any(True for _ in templated):
            check_template(self._tokenizer, self._model)
            check_blocks(self._tokenizer, of=repr(self._model.path))
            self._checked = True


Parts = list[list[int]]
"""Token ids of a text, in parts: the prompt; what is trained on; what is not, and what is, in turn."""


def _example(row: NumberedRow, raw: RawExample, parts: Sequence[Parts]) -> Example:
    place, data_source = row.where, row.columns.get("data_source")
    if not parts[0][0]:
        raise DataError(f"{place}: the prompt has no tokens", hint="remove the row")
    if any(answer[0] != parts[0][0] for answer in parts):
        raise DataError(
            f"{place}: the chat template writes the prompt of 'chosen' in another way than that of 'rejected'",
            hint="set data.trained_turns=last, or model.chat_template to a template that only ever appends",
        )
    answers = [
        TrainedResponse(
            ids=np.array([token for part in answer for token in part], np.int64),
            mask=np.repeat(np.arange(len(answer)) % 2 == 0, [len(part) for part in answer]),
        )
        for _, *answer in parts
    ]
    return Example(
        index=row.number,
        prompt_ids=np.array(parts[0][0], np.int64),
        raw=_before(raw),
        where=place,
        data_source=None if data_source is None else str(data_source),
        answers=tuple(answers),
        labels=raw.labels,
    )


def _before(raw: RawExample) -> Turns | str:
    """What stands before the first turn that is trained on."""
    (first, *_) = raw.responses
    if isinstance(raw.prompt, str) or isinstance(first, str):
        return raw.prompt
    return [*raw.prompt, *first][: raw.trained(first)[0]]


def _beyond(example: Example, section: DataSection) -> tuple[str, int, str, int] | None:
    """Which part is too long, its tokens, and the limit by key and value; None where none is."""
    prompt, response = (
        len(example.prompt_ids),
        max(len(answer.ids) for answer in example.answers),
    )
    if prompt > section.max_prompt_length:
        return "prompt", prompt, _PROMPT, section.max_prompt_length
    if response > section.max_response_length:
        return "response", response, _RESPONSE, section.max_response_length
    return None


@attrs.frozen
class _Text:
    """An answer with its prompt."""

    text: str
    cuts: tuple[int, ...]
    """Where its parts begin, without the first; see `Parts`."""

    @property
    def parts(self) -> list[str]:
        return [self.text[a:b] for a, b in pairwise((0, *self.cuts, len(self.text)))]


def _tokenised(tokenizer: Tokenizer, examples: Sequence[RawExample]) -> list[list[Parts]]:
    """The parts of every example's answers, each with its prompt."""
    parts = iter(_encoded(tokenizer, _texts(tokenizer, examples)) if examples else ())
    return [[next(parts) for _ in example.responses] for example in examples]


def _texts(tokenizer: Tokenizer, examples: Sequence[RawExample]) -> list[_Text]:
    """The text of every answer with its prompt."""
    templated = _templated(tokenizer, examples)
    return [
        _plain(tokenizer, example.prompt, response)
        if isinstance(example.prompt, str)
        else next(templated)
        for example in examples
        for response in example.responses
    ]


def _plain(tokenizer: Tokenizer, prompt: str, response: Any) -> _Text:
    """A text as it stands, between the tokenizer's beginning of sequence, where it writes one, and its end of sequence."""
    bos, eos = (getattr(tokenizer, name, None) or "" for name in ("bos_token", "eos_token"))
    writes = bos and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if writes and not prompt.startswith(bos):
        prompt = bos + prompt
    return _Text(prompt + response + eos, (len(prompt),))


@attrs.frozen
class _Conversation:
    """Messages up to the last turn that is trained on."""

    messages: Turns
    trained: list[int]
    """Places of the turns that are trained on."""
    tools: Any


def _templated(tokenizer: Tokenizer, examples: Sequence[RawExample]) -> Iterator[_Text]:
    """The texts of all examples of messages: by the template's `{% generation %}` blocks, else by the prefix method."""
    conversations = []
    for example in examples:
        for response in example.responses:
            if not isinstance(example.prompt, str) and not isinstance(response, str):
                places = example.trained(response)
                messages = [*example.prompt, *response][: places[-1] + 1]
                conversations.append(_Conversation(messages, places, example.tools))
    _check_tools(tokenizer, conversations)
    templates = [template_with_blocks(tokenizer, each.tools) for each in conversations]
    pairs = list(zip(conversations, templates, strict=True))
    by_prefix = _by_prefix(tokenizer, [each for each, template in pairs if template is None])
    for each, template in pairs:
        yield next(by_prefix) if template is None else _by_blocks(tokenizer, template, each)


def _by_blocks(tokenizer: Tokenizer, template: str, conversation: _Conversation) -> _Text:
    """What the template's blocks mark of the turns that are trained on.

    Raises:
        DataError: they mark nothing, or it is not known which of a conversation's turns a block marks.
    """
    text, spans = render(tokenizer, template, conversation.messages, conversation.tools)
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
    return _Text(text[: cuts[-1]], tuple(cuts[:-1]))


def _by_prefix(tokenizer: Tokenizer, conversations: Sequence[_Conversation]) -> Iterator[_Text]:
    """A turn is what it adds to the text of the messages before it, up to its end of turn.

    Raises:
        DataError: the template writes earlier turns anew once a turn follows them.
    """
    turns = [(each, place) for each in conversations for place in each.trained]
    if not turns:
        return
    before, after = (
        _rendered(
            tokenizer,
            [(each.messages[: place + more], each.tools) for each, place in turns],
            not more,
        )
        for more in (0, 1)
    )
    ends = tuple(_end_tokens(tokenizer))
    text, cuts = "", list[int]()
    for (each, place), asked, answered in zip(turns, before, after, strict=True):
        if not (asked.startswith(text) and answered.startswith(asked)):
            raise DataError(
                f"the chat template rewrites earlier turns: the text of the messages before message {place} is not the beginning "
                "of the text with it",
                hint="set data.trained_turns=last, or model.chat_template to a template that only ever appends or that marks "
                "answers with {% generation %}",
            )
        # What a template writes after an end of turn, no model generates.
        end = answered.rstrip()
        text = end if ends and end.endswith(ends) else answered
        cuts += [len(asked), len(text)]
        if place == each.trained[-1]:
            yield _Text(text, tuple(cuts[:-1]))
            text, cuts = "", []


def _check_tools(tokenizer: Tokenizer, conversations: Sequence[_Conversation]) -> None:
    """Check on the first conversation with tools that the template writes them."""
    given = next((each for each in conversations if each.tools), None)
    if given is None:
        return
    without, written = (
        tokenizer.apply_chat_template(given.messages, tools=tools, tokenize=False)
        for tools in (None, given.tools)
    )
    if without == written:
        raise DataError(
            "rows have 'tools', and the chat template does not write them",
            hint="set model.chat_template to one that does, or remove the column",
        )


def _rendered(
    tokenizer: Tokenizer, conversations: Sequence[tuple[Turns, Any]], asks: bool
) -> list[str]:
    """The texts of messages with tools; those without are rendered together."""
    how: dict[str, Any] = {"add_generation_prompt": asks, "tokenize": False}
    plain = [messages for messages, tools in conversations if not tools]
    texts = iter(tokenizer.apply_chat_template(plain, **how) if plain else ())
    return [
        tokenizer.apply_chat_template(messages, tools=tools, **how) if tools else next(texts)
        for messages, tools in conversations
    ]


def _end_tokens(tokenizer: Tokenizer) -> set[str]:
    """Texts of the special tokens."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_tokens, *(str(t) for t in added.values() if t.special)} - {""}


def _encoded(tokenizer: Tokenizer, texts: Sequence[_Text]) -> list[Parts]:
    """The token ids of every text's parts.

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
