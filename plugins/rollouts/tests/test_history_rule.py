"""Chat templates that change earlier turns of an episode, and the setting `on_history_change`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.interfaces import AgentLoop
from dovetail.sections import EpisodeSection
from dovetail_sdk.testing import template_tokenizer, temporary_plugins
from dovetail_sdk.testing.chat_templates import TEMPLATES

RULE = "history_changes"


class Asking(AgentLoop):
    """An agent loop whose later messages are a user's."""

    name = "asking"
    api = ">=1.0,<2"
    Config = EpisodeSection
    transitions = frozenset({"user"})

    async def run(self, session):
        await session.generate()


@pytest.mark.parametrize(
    ("chosen", "severity", "says"),
    [
        ("keep", "warning", "policy sees"),
        ("fork", "warning", "new sequence"),
        ("refuse", "error", "run is refused"),
    ],
)
def test_a_template_that_leaves_out_earlier_thinking_is_named_with_what_is_done_about_it(
    judge: Any, tmp_path: Path, chosen: str, severity: str, says: str
) -> None:
    template_tokenizer(TEMPLATES["thinking"]).save_pretrained(tmp_path)
    key = f"rollout.agent_loop.on_history_change={chosen}"
    with temporary_plugins(Asking):
        (finding,) = judge(
            RULE, {"model": {"path": str(tmp_path)}}, "rollout.agent_loop=asking", key
        )
    assert finding.severity == severity
    assert "thinking/user (it" in finding.message
    assert says in finding.message
    assert f"({key})" in finding.message


class Calling(Asking):
    """An agent loop whose later messages are results of tools."""

    name = "calling"
    transitions = frozenset({"tool"})


USERS_ALONE = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRICT = (
    "{% for tool in tools or [] %}{% for name, one in tool.function.parameters.properties | items %}"
    "{{ name + one.type + one.description + tool.function.description }}{% endfor %}{% endfor %}"
    + TEMPLATES["chatml"]
)


def test_a_template_that_does_not_render_the_results_of_tools_is_an_error(
    judge: Any, tmp_path: Path
) -> None:
    sections = {"model": {"path": str(tmp_path)}}
    template_tokenizer(USERS_ALONE).save_pretrained(tmp_path)
    with temporary_plugins(Calling, Asking):
        (finding,) = judge(RULE, sections, "rollout.agent_loop=calling")
        assert finding.severity == "error"
        assert "'calling' adds between turns: tool (" in finding.message
        others = judge(RULE, sections, "rollout.agent_loop=asking")
    assert all(finding.severity == "warning" for finding in others)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), STRICT])
def test_templates_that_render_results_of_tools_are_no_error(
    judge: Any, tmp_path: Path, template: str
) -> None:
    template_tokenizer(template).save_pretrained(tmp_path)
    with temporary_plugins(Calling):
        found = judge(RULE, {"model": {"path": str(tmp_path)}}, "rollout.agent_loop=calling")
    assert all(finding.severity == "warning" for finding in found)


def test_nothing_is_said_of_a_template_that_keeps_earlier_turns_nor_without_an_agent_loop(
    judge: Any, tmp_path: Path
) -> None:
    sections = {"model": {"path": str(tmp_path)}}
    with temporary_plugins(Asking):
        assert judge(RULE, sections, "rollout.agent_loop=asking") == []
        template_tokenizer(TEMPLATES["chatml"]).save_pretrained(tmp_path)
        assert judge(RULE, sections, "rollout.agent_loop=asking") == []
    template_tokenizer(TEMPLATES["thinking"]).save_pretrained(tmp_path)
    assert judge(RULE, sections) == []
