"""Markdown from plain text: tables, fences, links to papers, and text with escaped special characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dovetail_console.plugin_page import PAPER


def links(papers: Iterable[str]) -> str:
    """Convert arXiv numbers to Markdown links."""
    return ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)


def fenced(yaml: str) -> str:
    """Return YAML as a fenced code block."""
    return f"```yaml\n{yaml.rstrip()}\n```"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def prose(text: str) -> str:
    """Return a docstring as Markdown, with links to papers, and indented text as code."""
    blocks = text.split("\n\n")
    return "\n\n".join(block if block.startswith("    ") else inline(block) for block in blocks)


def inline(text: str) -> str:
    """Return text as Markdown with `*`, `_` and `<` escaped and papers linked; text in backticks is unchanged."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    text = re.sub(r"([*<]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return PAPER.sub(lambda match: f"[{match[0]}](https://arxiv.org/abs/{match[1]})", text)
