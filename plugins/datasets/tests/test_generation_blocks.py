"""Masks from `{% generation %}` blocks, compared with transformers, and with the prefix method on TRL's templates."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dataset_rows import InMemory, trained as trained_runs, turns

from dovetail.errors import ConfigError, DataError
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.example_rows import Example
from dovetail_datasets.load_examples import load_examples

Turns = list[dict[str, Any]]
HEAD = "<|im_start|>{{ m['role'] }}\n"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with marked answers."""
REWRITES = MARKED.replace(
    "{% generation %}", "{% generation %}{% if loop.last %}<think></think>{% endif %}"
)
"""A template that writes a thinking part only in the last turn; without blocks, it would be refused."""
LAST = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last")
"""A template that marks only the last message."""


def load(
    tokenizer: Any, row: dict[str, Any], kind: Any = "conversations", **section: Any
) -> Example:
    """Return the example of a row."""
    limits = {"max_prompt_length": 9999, "max_response_length": 9999, **section}
    data, model = DataSection(**limits), ModelSection(path="my/model")
    (example,) = load_examples(InMemory([row]), ["x"], tokenizer, data, model, kind).prompts
    assert isinstance(example, Example)
    return example


def trained(tokenizer: Any, example: Example, answer: int = 0) -> list[str]:
    """Return the trained texts, one for each run of True in the mask."""
    return trained_runs(tokenizer, example.answers[answer])


def test_what_the_blocks_mark_is_trained_on_and_nothing_else(templated) -> None:
    tokenizer = templated(MARKED)
    example = load(tokenizer, {"messages": turns("a", "b", "c", "d", "thanks")})
    assert trained(tokenizer, example) == ["b<|im_end|>", "d<|im_end|>"]
    assert (
        tokenizer.decode(example.prompt_ids)
        == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_with_blocks_may_rewrite_earlier_turns(templated) -> None:
    tokenizer = templated(REWRITES)
    example = load(tokenizer, {"messages": turns("a", "b", "c", "d")})
    assert trained(tokenizer, example) == ["b<|im_end|>", "<think></think>d<|im_end|>"]
    unmarked = REWRITES.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(DataError, match="rewrites earlier turns"):
        load(templated(unmarked), {"messages": turns("a", "b", "c", "d")})


def test_weights_and_the_setting_choose_among_the_marked_turns(templated) -> None:
    tokenizer, messages = templated(MARKED), turns("a", "b", "c", "d", "e", "f")
    last = load(tokenizer, {"messages": messages}, trained_turns="last")
    assert trained(tokenizer, last) == ["f<|im_end|>"]
    messages[3]["weight"] = 0
    assert trained(tokenizer, load(tokenizer, {"messages": messages})) == [
        "b<|im_end|>",
        "f<|im_end|>",
    ]
    response = {"prompt": turns("a", "b", "c"), "response": "d"}
    assert trained(tokenizer, load(tokenizer, response)) == ["d<|im_end|>"]


def test_a_pair_has_one_prompt_and_the_marked_answers(templated) -> None:
    tokenizer = templated(MARKED)
    example = load(tokenizer, {"prompt": "q", "chosen": "good", "rejected": "bad"}, "preferences")
    assert [trained(tokenizer, example, i) for i in (0, 1)] == [
        ["good<|im_end|>"],
        ["bad<|im_end|>"],
    ]
    tells = templated("{{ messages[-1]['content'] }}" + MARKED)
    with pytest.raises(DataError, match="'chosen'"):
        load(tells, {"prompt": "q", "chosen": "good", "rejected": "bad"}, "preferences")


def test_blocks_that_mark_nothing_or_not_every_turn_are_refused(templated) -> None:
    nothing = MARKED.replace("'assistant' %}", "'model' %}", 1)
    with pytest.raises(DataError, match=r"row 0: .*blocks mark no text.* 1 assistant turn"):
        load(templated(nothing), {"messages": turns("a", "b")})
    partly = templated(LAST)
    assert trained(partly, load(partly, {"messages": turns("a", "b", "c", "d")})) == ["d<|im_end|>"]
    with pytest.raises(DataError, match=r"mark 1 part.* 2 assistant turns"):
        load(partly, {"messages": turns("a", "b", "c", "d")}, trained_turns="last")


@pytest.mark.parametrize(
    "template",
    [
        "{% macro say(m) %}"
        + HEAD
        + "{% generation %}{{ m['content'] }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% set said %}x{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}{% endset %}{{ said }}",
        "{% filter trim %}{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}{% endfilter %}",
    ],
    ids=["macro", "set", "filter"],
)
def test_a_block_whose_place_transformers_can_not_tell_is_refused_with_its_model(
    templated, template
) -> None:
    with pytest.raises(ConfigError, match=r"'my/model' .*block"):
        load(templated(template), {"messages": turns("a", "b")})


# The training templates of TRL

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "x"}},
            "required": ["a"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS: Turns = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "1"},
    {"role": "assistant", "content": "one"},
]
SYSTEM: Turns = [{"role": "system", "content": "Be brief."}]
CASES: dict[str, tuple[Turns, list[Any] | None]] = {
    "one turn": (turns("a b", "c"), None),
    "two turns": (turns("a b", "c", "d", "e f"), None),
    "system": ([*SYSTEM, *turns("a b", "c", "d", "e f")], None),
    "tools": (CALLS, [TOOL]),
    "system, tools": ([*SYSTEM, *CALLS], [TOOL]),
}
HEADER = {
    *("gptoss", "muse_glimmer", "qwen2_5", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")
}
"""Templates whose blocks also mark part of the generation prompt: the header, its newline or `<think>`."""
PREFIX_REFUSES = {
    # The generation prompt (`<think>`) does not precede every answer.
    *((name, case) for name in ("deepseek_r1_distill", "deepseekv3") for case in CASES),
    *(
        (f"nemotron_3_{n}", case)
        for n in ("5_lightning", "nano", "super", "ultra")
        for case in CASES
    ),
    # The text after the last turn differs from the text after other turns.
    *((name, case) for name in ("gptoss", "phi3", "phi3_5") for case in ("two turns", "system")),
}
"""Templates and cases that the prefix method refuses: the text of a turn is not a prefix of the text with the next turn."""
DIFFER = {("diffusion_gemma", "tools"), ("diffusion_gemma", "system, tools")}
"""Templates without a new header for the turn after a tool's result, which the prefix method therefore counts as part of the answer."""
REFUSE = {
    **{
        (name, case): "must alternate"
        for name in ("cohere", "cohere2", "gemma3")
        for case in ("tools", "system, tools")
    },
    **{("llava_next", case): "Only user and assistant" for case in ("tools", "system, tools")},
    **{("gemma", case): "System role not supported" for case in ("system", "system, tools")},
    ("gemma", "tools"): "must alternate",
}
"""Templates and cases that the template itself refuses, with the error."""
NO_TOOLS = {
    "deepseek_r1_distill",
    "deepseekv3",
    "idefics3",
    "llama3",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "smolvlm",
}
"""Templates that do not write tools, which is refused."""
IN_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates that only accept content in parts."""


def in_parts(messages: Turns) -> Turns:
    """Return messages with content as a list of parts, as for vision-language models."""
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


@pytest.mark.nightly
def test_blocks_of_trls_templates_mark_what_transformers_says_and_the_prefix_method_does(
    templated, trl_templates
) -> None:
    for training, template in trl_templates.items():
        name = training.removesuffix("_training")
        if name == training:
            continue
        special = re.findall(
            r"<[|｜][^<>\s{}]+[|｜]>|<\w+_of_turn>|<end_of_utterance>|<turn\|>|<\|turn>", template
        )
        tokenizer = templated(template, sorted(set(special)))
        prefix = templated(
            re.sub(r"\{%-? *(end)?generation *-?%\}", _same_trimming, template),
            sorted(set(special)),
        )
        for case, (plain, tools) in CASES.items():
            where = (name, case)
            messages = in_parts(plain) if name in IN_PARTS else plain
            row = {"messages": messages, "tools": tools}
            if where in REFUSE:
                with pytest.raises(DataError, match=REFUSE[where]):
                    load(tokenizer, row)
                continue
            if tools and name in NO_TOOLS:
                with pytest.raises(DataError, match="'tools'"):
                    load(tokenizer, row)
                continue
            marked = load(tokenizer, row)
            assert_as_transformers(tokenizer, marked, messages, tools)
            if where in PREFIX_REFUSES:
                with pytest.raises(DataError, match="rewrites earlier turns"):
                    load(prefix, row)
                continue
            texts, others = trained(tokenizer, marked), trained(prefix, load(prefix, row))
            # Some templates mark a newline after the end of a turn; the prefix method never does.
            if where in DIFFER:
                assert texts != others
            elif name in HEADER:
                assert all(a.rstrip().endswith(b) for a, b in zip(texts, others, strict=True)), (
                    where
                )
                assert texts != others
            else:
                assert [t.rstrip() for t in texts] == [t.rstrip() for t in others], where


def _same_trimming(block: re.Match[str]) -> str:
    """Return a block without effect in place of `generation`, so that white space around it is trimmed as before."""
    text = block.group()
    return text.replace("endgeneration", "endif").replace("generation", "if true")


def assert_as_transformers(tokenizer: Any, example: Example, messages: Turns, tools: Any) -> None:
    """Compare ids and mask with transformers' `return_assistant_tokens_mask`, up to the last trained token."""
    whole = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    (answer,) = example.answers
    ids = [*example.prompt_ids, *answer.ids]
    mask = [0] * len(example.prompt_ids) + answer.mask.astype(int).tolist()
    assert ids == whole["input_ids"][: len(ids)]
    assert mask == whole["assistant_masks"][: len(ids)]
    assert not any(whole["assistant_masks"][len(ids) :])
