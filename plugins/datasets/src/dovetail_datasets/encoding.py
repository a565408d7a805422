"""TextEncoder: encodes rendered text so that only control tokens of the chat template become control tokens.

A message may spell a control token: a web page with `<|im_end|>` and the beginning of a system turn would pose as the system. Therefore
such spellings are marked before the template renders the messages. A copy of the tokenizer, whose control tokens have secret names,
encodes the result: the template's own control tokens are replaced by these names, and marked spellings are encoded as plain text.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from string import ascii_lowercase, digits
from typing import Any, Literal, TypeVar

from dovetail.interfaces import Message, Tokenizer
from dovetail_datasets.message_form import Tools, message_form
from dovetail_datasets.tokenizer import added_tokens, special_texts

T = TypeVar("T")
Parts = list[list[int]]
"""Token ids of a text in parts: the prompt, a trained part, and then untrained and trained parts alternately."""

_MARK = "".join(secrets.choice(digits) for _ in range(32))
"""Beginning of a mark: digits, which templates don't trim, escape or capitalise. They are random, so that no given text contains them."""
_SECRET = "".join(secrets.choice(ascii_lowercase) for _ in range(24))
"""Beginning of a control token's secret name: letters that no normalizer changes."""
_OPEN, _CLOSE = f"{_MARK}0", f"{_MARK}1"
"""The marks before and after a control token that a given text spells."""
_MARKED = f"{_OPEN}((?:(?!{_MARK}).)*){_CLOSE}|{_OPEN}|{_CLOSE}"
"""Pattern of two marks with the text between them, or of one mark, which remains if a template cuts text at a control token."""
_BARS = frozenset("|｜")


class Marked(str):
    """A rendered text with marks around those control tokens that are encoded as plain text, since they come from the data."""

    __slots__ = ()


class TextEncoder:
    """Renders messages with the chat template, and encodes the result.

    A message spells a control token if its text contains the token's text, such as `<|im_end|>`. A spelled token is encoded as plain text.
    Control tokens are the tokenizer's special tokens, and other added tokens that the chat template names, such as `<think>`.

    Exception: control tokens that the template names and that are not special, such as `<think>`, stay control tokens if an assistant's
    message spells them, since datasets write thoughts and calls in this way. If a message of `system`, `developer` or `user` spells
    them, they stay control tokens only if they contain no bar (`<think>`, but not `<｜User｜>`). In tool results, the exception does not
    apply.

    Args:
        tokenizer: a Hugging Face tokenizer.
        control_tokens: `data.control_tokens`; with `allow` all spelled control tokens are encoded as control tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, control_tokens: Literal["text", "allow"] = "text"
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self.spelled = 0
        """Number of control tokens that the texts encoded so far by `ids` and `parts` spell."""
        added = map(str, added_tokens(tokenizer)) if control_tokens == "text" else ()
        # Runs of white space that some tokenizers add are not control tokens.
        tokens = {word for word in added if word and not word[0].isspace()}
        special = {*special_texts(tokenizer)} & tokens
        template = str(getattr(tokenizer, "chat_template", None) or "")
        inline = {word for word in tokens if word in template} - special
        tags = {word for word in inline if not _BARS & {*word}}
        self._kept: dict[str, Collection[str]] = {
            "assistant": inline,
            **dict.fromkeys(("system", "developer", "user"), tags),
        }
        words = sorted(special | inline)
        self._names = {word: f"{_SECRET}{number}x" for number, word in enumerate(words)}
        self._firsts = {word[0] for word in words}
        self._pattern = re.compile("|".join([_MARKED, *_any_of(words)]), re.DOTALL)

    def texts(
        self,
        conversations: Iterable[tuple[Sequence[Message], Tools]],
        *,
        generate: bool = False,
        begun: bool = False,
    ) -> list[str]:
        """Render conversations with the chat template, and put marks around spelled control tokens, for `ids`.

        Args:
            conversations: the messages and the tools of each conversation.
            generate: whether the assistant's next turn begins after the last message.
            begun: whether the last message is the beginning of a turn, so that the text ends within that turn.

        Raises:
            DataError: see `messages`.
            Exception: any error of the template.
        """
        texts: list[str] = []
        for tools, those in groupby(conversations, key=lambda each: each[1] or None):
            texts += self.tokenizer.apply_chat_template(
                [self.messages(messages, tools) for messages, _ in those],
                tools=self.given(tools),
                add_generation_prompt=generate,
                continue_final_message=begun,
                tokenize=False,
            )
        return texts

    def prompts(self, conversations: Sequence[tuple[Sequence[Message], Tools]]) -> list[str]:
        """Render conversations as `texts` does, up to the point where the policy continues: a new turn, or the last turn if it is the
        assistant's.
        """
        return [
            text
            for begun, those in groupby(
                conversations, lambda each: each[0][-1]["role"] == "assistant"
            )
            for text in self.texts(those, generate=not begun, begun=begun)
        ]

    def messages(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Return messages in the form that the chat template takes, with marks around spelled control tokens.

        Raises:
            DataError: the arguments of a call are not a JSON object, and the template takes nothing else.
        """
        taken = message_form(self.tokenizer, tools).taken(messages)
        return [self.given(message, message.get("role")) for message in taken]

    def given(self, value: T, role: str | None = "system") -> T:
        """Put marks around the control tokens that a text spells, or the texts in lists and mappings, and return the result.

        Args:
            value: text, or containers with text, for a template or for encoding.
            role: the role of the message with this text, on which the class's exception depends; text outside messages counts
                as a system message's.
        """
        found: Any = value
        if isinstance(value, str):
            # Most texts contain no first character of a control token; this test is faster than the pattern.
            if not isinstance(value, Marked) and any(first in value for first in self._firsts):
                found = self._pattern.sub(lambda m: self._marked(m[0], role), value)
        elif isinstance(value, Mapping):
            found = {self.given(k, role): self.given(part, role) for k, part in value.items()}
        elif isinstance(value, (list, tuple)):
            found = [self.given(part, role) for part in value]
        return found

    def _marked(self, found: str, role: str | None) -> str:
        if found.startswith(_MARK) or found in self._kept.get(str(role), ()):
            return found
        return f"{_OPEN}{found}{_CLOSE}"

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts that `texts` or `given` returned."""
        self._count(texts)
        return self._ids(texts)

    def _count(self, texts: Iterable[str]) -> None:
        for text in texts:
            if _MARK in text:
                marked = (match[1] for match in self._pattern.finditer(text))
                self.spelled += sum(word in self._names for word in marked)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [found["input_ids"] for found in self.encodings(texts)]

    def encodings(self, *texts: Sequence[str], **how: Any) -> list[dict[str, Any]]:
        """Return the tokenizer's output for each text, by default without special tokens around it.

        Args:
            *texts: as in `ids`; a second sequence has the second text of each pair.
            **how: keyword arguments of the tokenizer, such as `add_special_tokens`.
        """
        rows = list(zip(*texts, strict=True))
        marked = [any(_MARK in text for text in row) for row in rows]
        made = {}
        for flag in {*marked}:
            alike = [row for row, has in zip(rows, marked, strict=True) if has is flag]
            made[flag] = iter(self._made(alike, flag, **how))
        return [next(made[flag]) for flag in marked]

    def _made(
        self,
        rows: Sequence[tuple[str, ...]],
        marked: bool,
        *,
        add_special_tokens: bool = False,
        **how: Any,
    ) -> list[dict[str, Any]]:
        tokenizer = self.tokenizer
        if marked and not self._is_fast:
            # Slow tokenizers can't be renamed. Cutting a marked spelling after its first character keeps it from being a control token.
            ids = [[self._ids_of_pieces(text) for text in row] for row in rows]
            around = tokenizer.build_inputs_with_special_tokens
            return [{"input_ids": around(*row) if add_special_tokens else row[0]} for row in ids]
        columns = [list(column) for column in zip(*rows, strict=True)]
        if marked:
            tokenizer = self._renamed
            columns = [[self._written(text) for text in column] for column in columns]
        batch = tokenizer(*columns, add_special_tokens=add_special_tokens, **how)
        return [
            dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)
        ]

    def _ids_of_pieces(self, text: str) -> list[int]:
        pieces = self._resolved(text, str, lambda given: f"{given[0]}{_MARK}{given[1:]}")
        ids = (
            self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            for piece in pieces.split(_MARK)
            if piece
        )
        return list(chain.from_iterable(ids))

    def parts(self, texts: Sequence[Sequence[str]]) -> list[Parts]:
        """Return the token ids of each part of texts. A text is given as a sequence of parts, of which the first is its prompt.

        The prompt has the same ids as if it were encoded alone, as in generation. If a token of the joined text would span two parts, the
        parts are encoded one by one.
        """
        self._count(chain.from_iterable(texts))
        prompts = self._ids([first for first, *_ in texts])
        wholes: Sequence[Any] = [None] * len(texts)
        if self._is_fast:
            joined = ["".join(parts) for parts in texts]
            wholes = self.encodings(joined, return_offsets_mapping=True)
        found = []
        for parts, prompt, whole in zip(texts, prompts, wholes, strict=True):
            marked = any(_MARK in part for part in parts)
            lengths = (len(self._written(part) if marked else part) for part in parts[:-1])
            split = whole and _split(
                whole["input_ids"], whole["offset_mapping"], [*accumulate(lengths)]
            )
            if not split or split[0] != prompt:
                split = [list(prompt), *self._ids(parts[1:])]
            found.append(split)
        return found

    @property
    def _is_fast(self) -> bool:
        return bool(getattr(self.tokenizer, "is_fast", False))

    def _written(self, text: str) -> str:
        """Replace the template's control tokens by their secret names, and remove the marks."""
        return self._resolved(text, lambda token: self._names.get(token, token), str)

    def _resolved(self, text: str, token: Callable[[str], str], given: Callable[[str], str]) -> str:
        """Remove the marks from a text; replace the template's control tokens and the marked spellings by the results of two functions.

        Args:
            text: a rendered text with marks.
            token: returns the replacement of a control token of the template.
            given: returns the replacement of a marked spelling.
        """

        def one(match: re.Match[str]) -> str:
            between = match[1]
            if between is None:
                return "" if match[0].startswith(_MARK) else token(match[0])
            whole = self._pattern.fullmatch(between)
            return given(between) if whole else self._resolved(between, token, given)

        return self._pattern.sub(one, text)

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The tokenizer's copy, in which control tokens have secret names."""
        from tokenizers import Tokenizer as Backend

        names, described = self._names, json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in described["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = described["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(word, word): i for word, i in model["vocab"].items()}
        else:  # a Unigram model lists words with scores
            model["vocab"] = [[names.get(word, word), score] for word, score in model["vocab"]]
        if "merges" in model:
            model["merges"] = [m for m in model["merges"] if not {*m, "".join(m)} & names.keys()]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        renamed = copy(self.tokenizer)
        renamed._tokenizer = Backend.from_str(json.dumps(described))  # noqa: SLF001 - transformers makes a tokenizer of files alone
        return renamed


def unmarked(text: str) -> str:
    """Return a text without the characters that this module puts around control tokens."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def with_beginning(tokenizer: Tokenizer, text: str) -> str:
    """Add the beginning-of-sequence token to a text that no template rendered, if the tokenizer adds one and the text lacks it."""
    bos = getattr(tokenizer, "bos_token", None) or ""
    writes = bos and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return bos + text if writes and not text.startswith(bos) else text


def _any_of(words: Iterable[str]) -> list[str]:
    """Return patterns that match any of the words, the longest first.

    They also match the beginning of a word at the end of a text, since the text that follows may complete the word.
    """
    found = []
    for first, group in groupby(sorted(words), key=lambda word: word[0]):
        rests = [word[1:] for word in group]
        longer = _any_of(filter(None, rests))
        rest = f"(?:{'|'.join([*longer, chr(92) + 'Z'])})" if longer else ""
        found.append(re.escape(first) + rest + ("?" if longer and "" in rests else ""))
    return found


def _split(ids: list[int], offsets: Sequence[tuple[int, int]], cuts: Sequence[int]) -> Parts | None:
    """Divide token ids at cuts of their text; return None if a token spans a cut."""
    starts = [start for start, _ in offsets]
    places = [bisect_left(starts, cut) for cut in cuts]
    if any(place and offsets[place - 1][1] > cut for place, cut in zip(places, cuts, strict=True)):
        return None
    return [ids[a:b] for a, b in pairwise((0, *places, len(ids)))]
