"""A rule about chat templates that leave out parts of rows."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces import Finding
from dovetail.planning import Plan
from dovetail.sections import RunConfig


def rows_left_out(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """The chat template leaves out some of what rows hold: texts of a role, thoughts, tool calls, or the end of turns that are trained on.

    Many templates skip what they do not know, such as messages of some role or a field of a message. The rule renders a copy of one row
    of each kind with marks in place of its texts, and looks for the marks. Thoughts of turns that are not trained on are ignored.
    """
    for what in plan.left_out if plan is not None else ():
        yield Finding.warning(
            what,
            hint="set model.chat_template to a template that writes it (in a {% generation %} block, where it has such blocks), or "
            "leave it out of the rows; thoughts may stand in the content, as <think>…</think>",
        )
