"""Reads Hydra's overrides: `key=value`, `+key=value`, `++key=value`, `~key`, with values in Hydra's grammar."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from dovetail.errors import ConfigError

Sign = Literal["", "+", "++", "~"]
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~|)(?P<key>[\w.@/\-]+)(?:=(?P<value>.*))?", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}  # fmt: skip


@attrs.frozen
class Override:
    """One Hydra override: the text as it was written, and its sign, key and value."""

    text: str
    sign: Sign
    key: str
    value: Any = None


def is_override(word: str) -> bool:
    """Return whether a word of a command is an override, not an option or a positional argument."""
    match = _OVERRIDE.fullmatch(word.removeprefix("--") if "=" in word else word)
    return match is not None and (match["value"] is not None or match["sign"] == "~")


def read_override(word: str) -> Override:
    """Read one override; `--key=value`, which some documentation prints, is read as `key=value`.

    Raises:
        ConfigError: the word is not an override, or its value is not a value of Hydra's grammar.
    """
    match = _OVERRIDE.fullmatch(word.removeprefix("--"))
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise ConfigError(
            f"{word!r} is not a Hydra override; expected key=value",
            hint="if the override has spaces, quote it as one word",
        )
    sign: Any = match["sign"]
    return Override(word, sign, match["key"], read_value(match["value"] or "", word))


def read_value(text: str, whole: str | None = None) -> Any:
    """Read a value in Hydra's grammar: quoted or bare text, numbers, booleans, null, lists and mappings.

    Args:
        text: the value as written.
        whole: the complete override, for errors; by default the value.

    Raises:
        ConfigError: the text is not a value of Hydra's grammar.
    """
    reader = _Reader(text, whole or text)
    value = reader.value(ends="")
    reader.expect_end()
    return value


@attrs.define
class _Reader:
    text: str
    whole: str
    at: int = 0

    def value(self, ends: str) -> Any:
        """Read a value that ends before one of these characters, or at the end of the text."""
        self._skip()
        first = self.text[self.at : self.at + 1]
        if first == "[":
            return self._items("]", lambda: self.value(",]"))
        if first == "{":
            return dict(self._items("}", self._pair))
        if first in ('"', "'") and first:
            quoted = self._quoted(first)
            self._skip()
            if self.at == len(self.text) or self.text[self.at] in ends:
                return quoted
            self.at = self.text.rindex(
                first, 0, self.at
            )  # with text after the quote, all is unquoted text
            self.at = self.text.index(first)
        return self._bare(ends)

    def expect_end(self) -> None:
        self._skip()
        if self.at < len(self.text):
            raise self._error("text follows the value")

    def _pair(self) -> tuple[Any, Any]:
        key = self.value(":")
        self._take(":")
        return key, self.value(",}")

    def _items(self, end: str, item: Any) -> list[Any]:
        self.at += 1
        found: list[Any] = []
        while True:
            self._skip()
            if self.text[self.at : self.at + 1] == end:
                self.at += 1
                return found
            if found:
                self._take(",")
            found.append(item())

    def _take(self, character: str) -> None:
        self._skip()
        if self.text[self.at : self.at + 1] != character:
            raise self._error(f"expected {character!r} at character {self.at + 1}")
        self.at += 1

    def _quoted(self, quote: str) -> str:
        end = self.at + 1
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self._error(f"the quote {quote} is not closed")
        inner, self.at = self.text[self.at + 1 : end], end + 1
        return inner.replace(f"\\{quote}", quote).replace("\\\\", "\\")

    def _bare(self, ends: str) -> Any:
        start, depth = self.at, 0
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\":
                self.at += 1
            elif self.text.startswith("${", self.at):
                depth += 1
            elif character == "}" and depth:
                depth -= 1
            elif character in ends and not depth:
                break
            self.at += 1
        word = self.text[start : self.at].strip()
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        if _NUMBER.fullmatch(word):
            plain = word.replace("_", "")
            return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
        return re.sub(r"\\([\\,:=\[\]{}() ])", r"\1", word)

    def _skip(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def _error(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.whole!r} can't be read as a Hydra override: {why}",
            hint="quote lists and mappings as one word of the shell, such as 'trainer.logger=[console,wandb]'",
        )
