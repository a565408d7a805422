"""Conditions that end a response: stop tokens, end-of-sequence tokens and stop strings.

If a token's own text contains a stop string, the token becomes a stop token. A stop string may also span several tokens. The tokens
that can complete it are therefore listed in advance, and the end of a response is decoded only after one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from dovetail.errors import RequestRefusedError
from dovetail.interfaces import SamplingParams, Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Maximum number of bytes, and thus of tokens, of one character in UTF-8."""


@attrs.frozen
class StopRule:
    """The conditions that end the responses of a request."""

    token_ids: frozenset[int] = frozenset()
    """Tokens that end a response regardless of earlier tokens."""
    completing: frozenset[int] = frozenset()
    """Tokens that may complete a stop string that earlier tokens began."""
    strings: tuple[str, ...] = ()
    """The stop strings that `completing` tokens may complete."""
    window: int = 0
    """Maximum number of tokens that a stop string can span."""
    tokenizer: Tokenizer = attrs.field(default=None, eq=False)

    @property
    def watches(self) -> bool:
        """Whether any token can end a response."""
        return bool(self.token_ids or self.completing)

    def ends(self, response: Sequence[int]) -> bool:
        """Return whether the last token of a response so far ends the response."""
        last = response[-1]
        if last in self.token_ids:
            return True
        if last not in self.completing:
            return False
        text = self.tokenizer.decode(list(response[-self.window :]), skip_special_tokens=False)
        return any(string in text for string in self.strings)


class StopRules:
    """Creates the stop rule of a request, and caches it for requests with the same stops."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._rules: dict[tuple[Any, ...], StopRule] = {}
        self._texts: list[str] | None = None

    def of(self, sampling: SamplingParams) -> StopRule:
        """Return the stop rule for sampling parameters.

        Raises:
            RequestRefusedError: a stop string is empty, or there is no tokenizer for stop strings.
        """
        key = (sampling.stop_token_ids, sampling.stop, sampling.ignore_eos)
        if key not in self._rules:
            self._rules[key] = self._make(sampling)
        return self._rules[key]

    def _make(self, sampling: SamplingParams) -> StopRule:
        token_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            token_ids |= self._eos
        if not sampling.stop:
            return StopRule(frozenset(token_ids))
        if "" in sampling.stop:
            raise RequestRefusedError(
                "a stop string is empty; expected one character or more",
                hint="leave it out of rollout.stop",
            )
        texts = self._token_texts()
        completing: set[int] = set()
        for string in sampling.stop:
            # The last character may consist of several tokens that decode to nothing valid one by one.
            alone = len(string) == 1 and string.isascii()
            endings = (string[-1],) if string[-1].isascii() else (string[-1], _REPLACEMENT)
            for token, text in enumerate(texts):
                if string in text:
                    token_ids.add(token)
                elif not alone and any(ending in text for ending in endings):
                    completing.add(token)
        longest = max(len(string) for string in sampling.stop)
        return StopRule(
            frozenset(token_ids),
            frozenset(completing - token_ids),
            sampling.stop,
            longest * _LONGEST_CHARACTER + 1,
            self._tokenizer,
        )

    def _token_texts(self) -> list[str]:
        """Return the text that each token adds, decoded after another token so that a leading space is kept."""
        if self._texts is not None:
            return self._texts
        if self._tokenizer is None:
            raise RequestRefusedError(
                "stop strings need a tokenizer, but this rollout has none",
                hint="use rollout.stop_token_ids",
            )
        anchor = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        decode = self._tokenizer.batch_decode
        prefix = decode([anchor], skip_special_tokens=False)[0]
        rows = [[*anchor, token] for token in range(len(self._tokenizer))]
        decoded = decode(rows, skip_special_tokens=False)
        self._texts = [text.removeprefix(prefix) for text in decoded]
        return self._texts


def eos_token_ids(model: Any, tokenizer: Tokenizer) -> set[int]:
    """Return the end-of-sequence tokens of the tokenizer, the model's config and the generation config."""
    found: set[int] = set()
    sources = (tokenizer, model.config.get_text_config(), getattr(model, "generation_config", None))
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(token) for token in value)
    return found
