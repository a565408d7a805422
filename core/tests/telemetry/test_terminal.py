"""What models and reward functions write is shown on a terminal, and changes nothing else there."""

from __future__ import annotations

import io
import json

import pytest
from rich.markup import escape
from rich.table import Table

from dovetail.telemetry import Terminal, visible, visible_json

CLEARS = "\x1b[2J\x1b[31m"
SHOWN = r"\x1b[2J\x1b[31m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (CLEARS, SHOWN),
        ("\x00\x07\x08\r", r"\x00\x07\x08\x0d"),
        ("\x7f\x80\x9b\x9f", r"\x7f\x80\x9b\x9f"),
        ("\u202a\u202e\u2066\u2069", r"\u202a\u202e\u2066\u2069"),
        ("\ud800x\udfff", r"\ud800x\udfff"),
        ("a\tb\nc é 漢 \u200f שלום \\x1b", "a\tb\nc é 漢 \u200f שלום \\x1b"),
    ],
)
def test_controls_are_escaped_and_text_is_left_alone(text, shown):
    assert visible(text) == shown


def test_json_shows_controls_and_reads_back_the_same():
    value = {"é\x9b": ["\u202e\x7f\x1b\n\\\udead"]}
    shown = visible_json(value)
    assert json.loads(shown) == value
    assert "é" in shown
    assert not {"\x9b", "\u202e", "\x7f", "\x1b", "\udead"} & set(shown)


def test_a_terminal_shows_controls_in_lines_and_in_tables_and_cuts_nothing_off():
    stream = io.StringIO()
    terminal = Terminal(file=stream, width=60, force_terminal=True, color_system=None)
    table = Table("head\x1b[0m")
    table.add_row(escape(f"[b]{CLEARS} end"))
    terminal.print(f"{CLEARS} line", markup=False)
    terminal.print(table)
    assert "\x1b" not in stream.getvalue()
    for expected in (f"{SHOWN} line", r"head\x1b[0m", f"[b]{SHOWN} end"):
        assert expected in stream.getvalue()
