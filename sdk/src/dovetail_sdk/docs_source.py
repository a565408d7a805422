"""Docstrings from the source: strings below attributes, and sections in Google's style as Markdown."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from dovetail.config.docs import own_docs
from dovetail_sdk.markdown import prose

_LISTED = ("Args:", "Raises:", "Attributes:")
_ENTRY = re.compile(r"^(\*{0,2}\w+): ", re.MULTILINE)


def attribute_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each attribute of a class and its bases; attributes without one are left out."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        docs.update(own_docs(owner))
    return {name: " ".join(text.split()) for name, text in docs.items()}


def markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: arguments and errors become lists, the rest is prose."""
    blocks = []
    for block in inspect.cleandoc(docstring or "").split("\n\n"):
        heading, _, rest = block.partition("\n")
        body = " ".join(textwrap.dedent(rest).split("\n")) if heading == "Returns:" else ""
        if heading in _LISTED:
            blocks.append(f"*{heading}*\n\n" + "\n".join(_items(textwrap.dedent(rest))))
        elif body:
            blocks.append(f"*{heading}* {prose(' '.join(body.split()))}")
        else:
            blocks.append(prose(block))
    return "\n\n".join(blocks)


def bare(member: object) -> Any:
    """Return the function that a class method, static method or property wraps; any other member unchanged."""
    return getattr(member, "__func__", getattr(member, "fget", member))


def _items(text: str) -> Iterator[str]:
    """Yield lines of the form `name: words` as list items; an indented line continues the line before."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") and lines:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    for line in lines:
        entry = _ENTRY.match(line)
        yield f"- `{entry[1]}`: {prose(line[entry.end() :])}" if entry else f"- {prose(line)}"
