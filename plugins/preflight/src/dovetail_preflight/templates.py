"""A rule about chat templates that leave out parts of rows."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces import Finding
from dovetail.planning import Plan
from dovetail.sections import RunConfig


def rows_left_out(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """The chat template leaves out content of rows: texts of a role, thoughts, tool calls, or the end of turns that are trained on.

    Many templates skip unknown content, such as messages of some role or a field of a message. The rule renders a copy of one row of each
    kind with markers in place of texts, and looks for the markers. Thoughts of turns that are not trained on are ignored.
    """
    for what in plan.left_out if plan is not None else ():
        yield Finding.warning(
            what,
            hint="set model.chat_template to a template that writes this part of a row (in a {% generation %} block if it has such blocks), or "
            "remove this part from the rows; thoughts can be written in the content, as <think>…</think>",
        )
