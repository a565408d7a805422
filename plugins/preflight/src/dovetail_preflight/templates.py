"""A rule about chat templates that leave out parts of rows."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces import Finding
from dovetail.planning import Plan
from dovetail.sections import RunConfig


def rows_left_out(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the chat template leaves out content of rows: texts of a role, thoughts, tool calls, or the end of trained turns.

    Many templates skip content that they do not know, such as the messages of a role or a field of a message. To find such content, one row
    of each kind is rendered with markers in place of its texts; a marker that the output lacks was left out. Thoughts of turns that are
    not trained on may be left out.
    """
    for what in plan.left_out if plan is not None else ():
        yield Finding.warning(
            what,
            hint="set model.chat_template to a template that writes this part of a row (in a {% generation %} block if it has such blocks), or "
            "remove this part from the rows; thoughts can be written in the content, as <think>…</think>",
        )
