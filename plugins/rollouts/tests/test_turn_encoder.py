"""The tokens that a chat template puts between two turns of the policy, and changes of earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from dovetail_rollouts import TurnEncoder
from dovetail_rollouts.template_transitions import TransitionClass, template_transitions
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import TEMPLATES, trl_templates

TOOLS = ({"type": "function", "function": {"name": "add", "description": "adds"}},)
PROMPT = [{"role": "user", "content": "question"}]
USER = [{"role": "user", "content": "and now?"}]


def calls_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": number}},
        }
        for number in range(count)
    ]


def results(count: int) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": f"call{number:05}",
            "name": "add",
            "content": f"= {number}",
        }
        for number in range(count)
    ]


def encoder_of(
    template: str, tools: Sequence[dict[str, Any]] = TOOLS, special: Sequence[str] = ()
) -> TurnEncoder:
    tokenizer = template_tokenizer(template)
    tokenizer.add_tokens([AddedToken(word, special=True) for word in special])
    return TurnEncoder(tokenizer, tools)


ENDS = {
    "chatml": "<|im_end|>",
    "thinking": "<|im_end|>",
    "headers": "<|eot_id|>",
    "instruct": "</s>",
}
"""The token that ends a turn, by template."""


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(("calls", "following"), [((), USER), (calls_of(1), results(1))])
def test_a_conversation_of_appended_turns_is_what_the_template_renders(
    name: str, calls: list[dict[str, Any]], following: list[dict[str, Any]]
) -> None:
    encoder = encoder_of(TEMPLATES[name], ())
    turn = {"role": "assistant", "content": "" if calls else "hm", "tool_calls": calls}
    if not calls:
        del turn["tool_calls"]
    asked = encoder.render(PROMPT, generate=True)
    whole = encoder.render([*PROMPT, turn], generate=False)
    produced = whole[len(asked) : whole.rindex(ENDS[name]) + len(ENDS[name])]
    (end,) = encoder.encode(ENDS[name])
    after = encoder.after(PROMPT, following, calls=calls, ended_by=end)
    assert asked + produced + encoder.decode(after) == encoder.render(
        [*PROMPT, turn, *following], generate=True
    )
    # A turn that was cut off gets the token that ends a turn.
    cut = encoder.after(PROMPT, following, calls=calls, ended_by=None)
    assert cut == [end, *after]


def test_the_token_that_begins_what_follows_is_not_repeated_where_the_policy_ended_its_turn_with_it() -> (
    None
):
    encoder = encoder_of(TEMPLATES["observer"])
    (observation,) = encoder.encode("<|observation|>")
    calls, following = calls_of(2), results(2)
    ended = encoder.after(PROMPT, following, calls=calls, ended_by=observation)
    assert encoder.decode(ended) == "\n= 0<|observation|>\n= 1<|assistant|>\n"
    cut = encoder.after(PROMPT, following, calls=calls, ended_by=None)
    assert cut == [observation, *ended]


def test_another_token_that_ends_turns_takes_the_place_of_the_templates_own() -> None:
    encoder = encoder_of(TEMPLATES["chatml"])
    (other,) = encoder.encode("</s>")
    (own,) = encoder.encode("<|im_end|>")
    assert encoder.after(PROMPT, USER, ended_by=other) == encoder.after(PROMPT, USER, ended_by=own)


def test_what_stands_in_the_prompt_is_no_part_of_what_follows() -> None:
    encoder = encoder_of(TEMPLATES["chatml"])
    long = [*PROMPT, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    assert encoder.after(PROMPT, USER, ended_by=None) == encoder.after(long, USER, ended_by=None)


@pytest.mark.parametrize(
    ("name", "changing", "unsupported"),
    [
        ("chatml", set(), set()),
        ("observer", set(), set()),
        ("thinking", {"thinking/user"}, set()),
        ("headers", {"thinking/tool"}, {"parallel_tools"}),
        ("instruct", {"user", "thinking/user", "thinking/tool"}, set()),
    ],
)
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_transitions_are_classed(
    name: str, changing: set[str], unsupported: set[str], special: tuple[str, ...]
) -> None:
    found = {
        t.name: t.found for t in template_transitions(encoder_of(TEMPLATES[name], special=special))
    }
    assert {n for n, c in found.items() if c is TransitionClass.HISTORY_CHANGING} == changing
    assert {n for n, c in found.items() if c is TransitionClass.UNSUPPORTED} == unsupported


def test_a_template_that_leaves_messages_out_is_unsupported() -> None:
    template = (
        TEMPLATES["chatml"]
        .replace("{%- if message.role == 'tool' %}", "{%- if message.role == 'tool' and false %}")
        .replace("{%- else %}", "{%- elif message.role != 'tool' %}")
    )
    found = {t.name: t for t in template_transitions(encoder_of(template))}
    assert found["tool"].found is TransitionClass.UNSUPPORTED
    assert found["user"].found is TransitionClass.STABLE


@pytest.mark.trl
@pytest.mark.nightly
def test_the_templates_of_trl_are_classed_and_their_observations_encoded() -> None:
    templates = trl_templates()
    if not templates:
        pytest.skip("TRL is not installed here; `make nightly PART=3/3` runs it where it is")
    stable = 0
    for template in templates.values():
        encoder = encoder_of(template)
        found = {t.name: t.found for t in template_transitions(encoder)}
        stable += found["tool"] is TransitionClass.STABLE
        if found["tool"] is TransitionClass.UNSUPPORTED:
            continue
        text = encoder.decode(
            encoder.after(PROMPT, results(1), calls=calls_of(1), ended_by=encoder.encode("</s>")[0])
        )
        assert "= 0" in text
        assert "SENTINEL" not in text
        assert "question" not in text
    assert stable > 30


def test_a_text_that_is_not_too_long_stays() -> None:
    message = {"role": "tool", "content": "0123456789"}
    assert encoder_of(TEMPLATES["chatml"]).shortened(message, 10, "middle") == message


@pytest.mark.parametrize("side", ["left", "middle", "right"])
@pytest.mark.parametrize("length", [50, 3_000_000])
def test_a_longer_text_loses_the_part_that_the_config_says(side: str, length: int) -> None:
    encoder = encoder_of(TEMPLATES["chatml"])
    text = "A" * (length // 2) + "é" + "Z" * (length // 2)
    message = encoder.shortened({"role": "tool", "content": text}, 20, side)
    content = str(message["content"])
    assert len(encoder.encode(content)) <= 20
    assert content.startswith("A") == (side != "left")
    assert content.endswith("Z") == (side != "right")
    assert "\ufffd" not in content
