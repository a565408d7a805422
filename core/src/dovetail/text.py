"""Text that UTF-8 can't encode: lone surrogates, which JSON's escapes and Python's file names can put into a string."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def encodable(value: Any) -> Any:
    """Return a text, or nested containers of texts, that UTF-8 can encode: surrogate pairs are joined, lone surrogates become U+FFFD."""
    if isinstance(value, str):
        if value.isascii():
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {encodable(key): encodable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [encodable(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def unencodable(value: object) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield each text or key in nested containers that UTF-8 can't encode, with its key path."""
    waiting: list[tuple[tuple[str | int, ...], object]] = [((), value)]
    while waiting:  # a stack, not recursion: rows may be nested beyond Python's recursion limit
        path, part = waiting.pop()
        if isinstance(part, str):
            if not part.isascii() and encodable(part) != part:
                yield path, part
        elif isinstance(part, Mapping):
            for key, inner in part.items():
                waiting += (((*path, key), inner), (path, key))
        elif isinstance(part, (list, tuple)):
            waiting += [((*path, i), inner) for i, inner in enumerate(part)]
