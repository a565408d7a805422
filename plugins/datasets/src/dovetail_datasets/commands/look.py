"""Rows as the model sees them: their text with special tokens, the trained parts, tools, images, and their reward."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, islice
from typing import Any

import attrs
import click

from dovetail.errors import DataError, DovetailError
from dovetail.interfaces import BadRow, Prompt
from dovetail.telemetry import visible
from dovetail_datasets.commands.opened import OpenedData
from dovetail_datasets.example_rows import Example
from dovetail_datasets.media.images import open_image
from dovetail_datasets.rows import NumberedRow
from dovetail_datasets.schema import TOOLS, tools_of

_THUMBNAIL = 160
"""Pixels of a thumbnail's longer side."""
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #8886;padding:.7rem;border-radius:4px}
.trained{background:#2a82;font-weight:600}.special{color:#07a}.bad{color:#b00}"""


@attrs.frozen(kw_only=True)
class SeenRow:
    """A row as `dovetail data look` shows it."""

    where: str
    facts: tuple[str, ...]
    """Facts about the row, each as one line."""
    texts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    """Prompt and answers by name, each as pairs of a kind (`plain`, `trained` or `special`) and a text."""
    images: tuple[bytes, ...] = ()
    """Thumbnails of the row's images, as PNG."""
    problem: str = ""
    """The reason why the row is left out; empty if it is used."""


def seen(opened: OpenedData, first: int, count: int) -> Iterator[SeenRow]:
    """Yield up to `count` rows of the first training dataset, beginning with row `first`, counted from 0.

    Raises:
        DataError: the dataset has no such rows.
    """
    rows = list(islice(opened.rows(first), count))
    if not rows:
        raise DataError(
            f"--from {first} is beyond the last row of {', '.join(opened.files)}",
            hint="choose a smaller number; rows are counted from 0",
        )
    verdicts = _verdicts(opened, rows)
    for row in rows:
        yield _seen(opened, row, verdicts)


def _seen(opened: OpenedData, row: NumberedRow, verdicts: dict[int, str]) -> SeenRow:
    found = opened.became(row)
    if isinstance(found, BadRow):
        return SeenRow(where=row.where, facts=(), problem=str(found.error))
    if found is None:
        limits = opened.data.limits.rstrip(",")
        return SeenRow(where=row.where, facts=(), problem=f"it is longer than {limits}")
    facts = [f"prompt: {len(found.prompt_ids):,} tokens"]
    texts = [("prompt", _pieces(opened, found.prompt_ids, None))]
    if isinstance(found, Example):
        names = ("chosen", "rejected") if len(found.answers) > 1 else ("response",)
        for name, answer in zip(names, found.answers, strict=True):
            facts.append(
                f"{name}: {len(answer.ids):,} tokens, {int(answer.mask.sum()):,} of them trained on"
            )
            texts.append((name, _pieces(opened, answer.ids, answer.mask)))
        facts += [f"{name}: {value}" for name, value in found.labels.items()]
        facts += [f"cut to its limit: {found.lost:,} tokens are lost"] if found.lost else []
    assert not isinstance(row.columns, DataError)
    if tools := tools_of(row.columns.get(TOOLS), row.where):
        facts.append(f"tools: {', '.join(tool.get('function', tool)['name'] for tool in tools)}")
    facts += [verdicts[row.number]] if row.number in verdicts else []
    return SeenRow(
        where=row.where, facts=tuple(facts), texts=tuple(texts), images=tuple(_thumbnails(found))
    )


def _pieces(opened: OpenedData, ids_T: Any, mask_T: Any | None) -> tuple[tuple[str, str], ...]:
    """Return the text of tokens in pieces: pairs of a kind (see `SeenRow.texts`) and a text.

    Args:
        opened: the data, with its tokenizer.
        ids_T: the token ids, int64 [T].
        mask_T: the mask of the trained tokens, bool [T]; None if no token is trained.
    """
    tokenizer: Any = opened.data.tokenizer
    special = {*tokenizer.all_special_ids}
    kinds = [
        "trained"
        if mask_T is not None and mask_T[place]
        else "special"
        if token in special
        else "plain"
        for place, token in enumerate(ids_T.tolist())
    ]
    grouped = groupby(zip(kinds, ids_T.tolist(), strict=True), key=lambda each: each[0])
    return tuple(
        (kind, tokenizer.decode([token for _, token in those], skip_special_tokens=False))
        for kind, those in grouped
    )


def _thumbnails(prompt: Prompt) -> Iterator[bytes]:
    for reference in prompt.media:
        picture = open_image(reference.read(), reference.path)
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
        sink = io.BytesIO()
        picture.save(sink, "PNG")
        yield sink.getvalue()


def _verdicts(opened: OpenedData, rows: Sequence[NumberedRow]) -> dict[int, str]:
    """Return, by row index, the reward's verdict on each row's first reference answer as text. If scoring fails, all rows get its error."""
    try:
        found = [*opened.verdicts(rows)]
    except DovetailError as error:
        return {row.number: f"reward: {error.message}" for row in rows}
    return {verdict.row: f"reward: {verdict.text}" for verdict in reversed(found)}


def as_text(row: SeenRow) -> Iterator[str]:
    """Yield a row's lines for a terminal."""
    yield click.style(visible(row.where), bold=True)
    for fact in row.facts:
        yield f"  {visible(fact)}"
    if row.problem:
        yield click.style(f"  left out: {visible(row.problem)}", fg="red")
    if row.images:
        yield f"  images: {len(row.images)} (--html shows them)"
    for name, pieces in row.texts:
        yield click.style(f"  {name}:", dim=True)
        yield "".join(_styled(kind, text) for kind, text in pieces)
    yield ""


def _styled(kind: str, text: str) -> str:
    text = "\n".join(map(visible, text.split("\n")))
    if kind == "trained":
        # The brackets show the trained text on terminals without colour.
        return click.style(f"⟦{text}⟧", fg="green")
    return click.style(text, fg="cyan") if kind == "special" else text


def as_html(title: str, rows: Iterator[SeenRow]) -> str:
    """Return rows as an HTML page that needs no other file."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p><span class=trained>What is trained on</span>, ",
        "<span class=special>special tokens</span>.</p>",
    ]
    for row in rows:
        parts.append(f"<h2>{escape(row.where)}</h2><ul>")
        parts += [f"<li>{escape(fact)}</li>" for fact in row.facts]
        parts.append("</ul>")
        if row.problem:
            parts.append(f"<p class=bad>left out: {escape(row.problem)}</p>")
        for image in row.images:
            data = base64.b64encode(image).decode()
            parts.append(f'<img alt="image of the row" src="data:image/png;base64,{data}"> ')
        for name, pieces in row.texts:
            text = "".join(f"<span class={kind}>{escape(piece)}</span>" for kind, piece in pieces)
            parts.append(f"<h3>{escape(name)}</h3><pre>{text}</pre>")
    return "\n".join(parts)
