"""The content that a chat template leaves out of rows is named, and no other content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from dataset_rows import say

from dovetail.errors import DataError
from dovetail_rollouts import TurnEncoder
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import TEMPLATES

WRITES = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "{{ '<|start|>' + m.role + ':' + (m.content or '') }}{% for c in m.tool_calls or [] %}<{{ c.function | tojson }}>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""A template that writes everything but thoughts."""

FORGETS = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list | last %}{% for m in messages %}<|start|>{{ m.role }}:"
    "{% set text = m.content if loop.index0 > messages.index(asked) else m.content.split('</think>')[-1] %}{% if m.role == 'assistant' %}"
    "{{ text }}<|end|>{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""A template like Qwen3's, which leaves out the thoughts of turns before the last question."""


def user(text: str) -> dict[str, Any]:
    return say("user", text)


def answer(text: Any, **more: Any) -> dict[str, Any]:
    return say("assistant", text, **more)


def call(number: int, city: str) -> dict[str, Any]:
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": city}},
    }


def result(number: int, text: str) -> dict[str, Any]:
    return say("tool", text, name="weather", tool_call_id=f"call0000{number}")


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Which."}},
            "required": ["city"],
        },
    },
}
CALLS = [user("ask"), answer("", tool_calls=[call(0, "rome")]), result(0, "sunny"), answer("reply")]


def named(left_out: Sequence[str]) -> set[str]:
    """Return short names of the content that the notes list."""
    kinds = {
        "thoughts": "thoughts",
        "calls in": "calls",
        "texts of the role 'assistant'": "answers",
        "texts of the role 'tool'": "results",
        "texts of the role 'system'": "system",
        "texts of the role 'user'": "questions",
        "no end of a turn": "end",
    }
    return {short for note in left_out for words, short in kinds.items() if words in note}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (WRITES, [say("system", "brief"), user("ask"), answer("reply")], set()),
        (WRITES, CALLS, set()),
        (WRITES, [user("ask"), answer("reply", reasoning_content="ponder")], {"thoughts"}),
        (WRITES, [user("ask"), answer("<think>ponder</think>reply")], set()),
        (WRITES, [user("ask"), answer([{"type": "text", "text": "reply"}])], set()),
        (WRITES.replace("tool_calls", "calls"), CALLS, {"calls"}),
        (WRITES.replace("c.function | tojson", "c.function.name"), CALLS, {"calls"}),
        (
            WRITES.replace("c.function | tojson", "c.function.arguments.values() | list"),
            CALLS,
            {"calls"},
        ),
        (WRITES.replace("in messages", "in messages if m.role != 'tool'"), CALLS, {"results"}),
        (
            WRITES.replace("in messages", "in messages if m.role != 'system'"),
            [say("system", "brief"), user("ask"), answer("reply")],
            {"system"},
        ),
        (
            WRITES.replace("(m.content or '')", "(m.content or '').split('</think>')[-1]"),
            [user("ask"), answer("<think>ponder</think>reply")],
            {"thoughts"},
        ),
        # A template may trim or escape a text without leaving it out.
        (
            WRITES.replace("(m.content or '')", "(m.content or '') | trim | replace('&', '&amp;')"),
            [user(" a\n & b"), answer("\tc <d>")],
            set(),
        ),
    ],
)
def test_what_a_template_leaves_out_of_conversations_is_named(
    read, template: str, messages: Any, expected: set[str]
) -> None:
    row = {"messages": messages}
    assert named(read(template, [row]).left_out) == expected


def test_spelled_control_tokens_are_counted_once_and_hide_nothing_that_is_left_out(read) -> None:
    thought = answer("<think>ponder</think>reply<|end|>")
    later = [user("<|start|>"), answer("<|end|>", reasoning_content="<|end|>")]
    tool = {**TOOL, "function": {**TOOL["function"], "description": "<|end|>"}}
    row = {"messages": [say("system", "<|start|>"), user("<|end|>"), thought, *later]}
    found = read(WRITES, [{**row, "tools": [tool]}] * 2)
    assert named(found.left_out) == {"thoughts"}
    assert found.spelled == 2 * 5
    described = WRITES.replace("t.function.name", "t | tojson")
    assert read(described, [{**row, "tools": [tool]}]).spelled == 6
    assert read(described, [{**row, "tools": [tool]}], control_tokens="allow").spelled == 0


def test_thoughts_of_turns_that_are_not_trained_on_may_go(read) -> None:
    def turn(text: str) -> dict[str, Any]:
        return answer(f"<think>\nponder\n</think>\n\n{text}")

    row = {"messages": [user("ask"), turn("reply"), user("more"), turn("again")]}
    assert read(FORGETS, [row], trained_turns="last").left_out == ()
    assert read(FORGETS, [{"prompt": row["messages"][:3]}], "prompts").left_out == ()
    written = "{{ text }}<|end|>"
    assert FORGETS.count(written) == 1
    marked = FORGETS.replace(written, "{% generation %}" + written + "{% endgeneration %}")
    assert named(read(marked, [row], trained_turns="last").left_out) == set()
    assert named(read(marked, [row]).left_out) == {"thoughts"}


def test_a_prompt_misses_what_its_template_does_not_know(read) -> None:
    rows = [{"prompt": [say("developer", "brief"), user("ask")]}, {"prompt": [user("ask")]}]
    template = WRITES.replace("in messages", "in messages if m.role in ('user', 'assistant')")
    found = read(template, rows, "prompts")
    assert re.search(
        r"role 'developer' in 1 of 2 rows \(the first: .*rows.jsonl, line 1\)", *found.left_out
    )
    assert read(WRITES, rows, "prompts").left_out == ()


def test_rows_are_counted_by_what_they_have(read) -> None:
    thought = answer("reply", reasoning_content="ponder")
    rows = [
        {"messages": [user("ask"), answer("reply")]},
        {"messages": [user("ask"), thought]},
        {"messages": [user("ask"), answer("reply"), user("more"), thought]},
        {"messages": [user("ask"), answer("reply"), user("more"), answer("again")]},
    ]
    found = read(WRITES, rows)
    assert re.search(
        r"'reasoning_content'.* in 2 of 4 rows \(the first: .*line 2\)", *found.left_out
    )
    # Rows that are too long are not counted.
    long = {"messages": [user("ask" * 999), thought]}
    assert "1 of 2 rows" in read(WRITES, [*rows[:2], long], limit=99).left_out[0]


def test_both_answers_of_a_pair_are_looked_at(read) -> None:
    pair = {
        "prompt": "ask",
        "chosen": [answer("reply")],
        "rejected": [answer("no", reasoning_content="ponder")],
    }
    assert named(read(WRITES, [pair], "preferences").left_out) == {"thoughts"}
    pair["rejected"] = [answer("no")]
    assert read(WRITES, [pair], "preferences").left_out == ()


def test_functions_that_the_template_does_not_write_are_refused_in_rows_and_prompts(read) -> None:
    template = WRITES.replace("in tools or []", "in []")
    for kind, row in (("conversations", {"messages": CALLS}), ("prompts", {"prompt": CALLS[:1]})):
        rows = [row, {**row, "tools": [TOOL]}]
        with pytest.raises(DataError, match=r"rows.jsonl, line 2: .*'tools'"):
            read(template, rows, kind)
        assert "[weather]" in read(WRITES, rows, kind).prompts[1]


def test_texts_without_a_template_are_not_looked_at(read) -> None:
    assert read(WRITES, [{"prompt": "a", "response": "b"}], plain_prompts="raw").left_out == ()
    assert read(WRITES, [{"prompt": "a"}], "prompts", plain_prompts="raw").left_out == ()


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_write_everything_raise_no_alarm(read, name: str) -> None:
    for messages, tools in CONVERSATIONS.values():
        assert_named_is_missing(read, TEMPLATES[name], messages, tools)


@pytest.mark.nightly
def test_no_false_alarm_and_none_missing_on_the_templates_of_trl(read, trl_templates) -> None:
    compared = 0
    for name, template in trl_templates.items():
        for case, (messages, tools) in CONVERSATIONS.items():
            compared += assert_named_is_missing(read, template, messages, tools, where=(name, case))
    assert compared > 1500


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "one turn": ([user("ask"), answer("reply")], None),
    "two turns": ([user("ask"), answer("reply"), user("more"), answer("again")], None),
    "system": ([say("system", "brief"), user("ask"), answer("reply")], None),
    "white space": (
        [user("  ask\n"), answer("\n reply \n"), user("more\n\n"), answer("again ")],
        None,
    ),
    "parts": (
        [user([{"type": "text", "text": "ask"}]), answer([{"type": "text", "text": "reply"}])],
        None,
    ),
    "call": (CALLS, [TOOL]),
    "calls at once": (
        [
            user("ask"),
            answer("", tool_calls=[call(0, "rome"), call(1, "oslo")]),
            result(0, "sunny"),
            result(1, "rainy"),
            answer("reply"),
        ],
        [TOOL],
    ),
    "text and call": (
        [
            user("ask"),
            answer("wait", tool_calls=[call(0, "rome")]),
            result(0, "sunny"),
            answer("reply"),
        ],
        [TOOL],
    ),
    "thought": ([user("ask"), answer("reply", reasoning_content="ponder")], None),
    "thoughts": (
        [
            user("ask"),
            answer("reply", reasoning_content="ponder"),
            user("more"),
            answer("again", reasoning_content="muse"),
        ],
        None,
    ),
    "thought and call": (
        [
            user("ask"),
            answer("", reasoning_content="ponder", tool_calls=[call(0, "rome")]),
            result(0, "sunny"),
            answer("reply", reasoning_content="muse"),
        ],
        [TOOL],
    ),
    "inline": ([user("ask"), answer("<think>\nponder\n</think>\n\nreply")], None),
    "inline twice": (
        [
            user("ask"),
            answer("<think>\nponder\n</think>\n\nreply"),
            user("more"),
            answer("<think>\nmuse\n</think>\n\nagain"),
        ],
        None,
    ),
}
WORDS = {
    **dict.fromkeys(("ask", "more"), "questions"),
    **dict.fromkeys(("reply", "again", "wait"), "answers"),
    **dict.fromkeys(("ponder", "muse"), "thoughts"),
    **dict.fromkeys(("rome", "oslo"), "calls"),
    **dict.fromkeys(("sunny", "rainy"), "results"),
    "brief": "system",
}


def assert_named_is_missing(
    read: Any, template: str, messages: Any, tools: Any, where: object = ""
) -> int:
    """Compare the named content with the words that no rendered text contains; return the number of rows compared."""
    functions = {"tools": tools} if tools else {}
    turns = [m for m in messages if m["role"] == "assistant"]
    asks = messages[: messages.index(turns[-1])]
    pair = {"prompt": asks, "chosen": turns[-1:], "rejected": [answer("never")]}
    compared = 0
    for kind, row, given, trained, section in (
        ("conversations", {"messages": messages}, messages, turns, {}),
        ("conversations", {"messages": messages}, messages, turns[-1:], {"trained_turns": "last"}),
        ("preferences", pair, messages, turns[-1:], {}),
        ("prompts", {"prompt": asks}, asks, [], {}),
    ):
        try:
            found = read(template, [{**row, **functions}], kind, **section)
        except DataError:
            continue
        compared += 1
        text = "".join(found.texts[:1] or found.prompts)
        missing = {WORDS[word] for word in words(trained) if word not in "".join(found.trained[:1])}
        for word in words(given) - words(trained):
            missing |= {WORDS[word]} - {"thoughts"} if word not in text else set()
        assert named(found.left_out) == missing, (where, kind, section, found)
    return compared


def words(messages: Any) -> set[str]:
    return {word for word in WORDS if word in str(messages)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3", "smolvlm", "glm4moe"])
def test_what_turns_observe_is_in_the_forms_that_templates_take(trl_templates, name: str) -> None:
    encoder = TurnEncoder(template_tokenizer(trl_templates[name]))
    for content in ("words", [{"type": "text", "text": "words"}]):
        shown = encoder.decode(encoder.after([user("ask")], [user(content)], ended_by=None))
        assert "words" in shown
        assert "{" not in shown
