"""Arguments of chat templates: the rendered text, the saved template, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_rows import files_source
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from dovetail.errors import ConfigError
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.chat_template import with_arguments
from dovetail_datasets.prompts import load_prompts
from dovetail_datasets.tokenizer import load_tokenizer

THINKING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""Similar to Qwen3's template."""
DATED = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- macro header() %}{{ 'Today: ' + date_string + (' in ' + place if place else '') + '\\n' }}{% endmacro %}
{{- header() }}
{%- for message in messages %}{{ message.content }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"""
"""Similar to Llama 3's template, with a macro."""
MARKED = """  text before
{% for message in messages %}{% generation %}{{ message.content }}{{ mark }}{% endgeneration %}{% endfor %}
"""
ASK = [{"role": "user", "content": "2 + 2 ="}]


def loaded(directory: Path, template: str, **arguments: Any) -> Any:
    section = ModelSection(path=str(directory), chat_template=template)
    return load_tokenizer(section, chat_template_args=arguments)


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (THINKING, {"enable_thinking": False}),
        (THINKING, {"enable_thinking": True}),
        (DATED, {"date_string": "2026-01-01"}),
        (DATED, {"date_string": "2026-01-01", "place": "Zürich 🏔"}),
        (MARKED, {"mark": None}),
    ],
)
def test_arguments_render_as_if_every_caller_gave_them(
    tokenizer_directory, template, arguments
) -> None:
    plain = loaded(tokenizer_directory, template)
    options = {"tokenize": False, "add_generation_prompt": True}
    expected = plain.apply_chat_template(ASK, **options, **arguments)
    tokenizer = loaded(tokenizer_directory, template, **arguments)
    assert tokenizer.apply_chat_template(ASK, **options) == expected
    assert tokenizer.apply_chat_template([ASK, ASK], **options) == [expected, expected]


def test_what_the_caller_gives_wins_over_the_config(tokenizer_directory) -> None:
    tokenizer = loaded(tokenizer_directory, THINKING, enable_thinking=False)
    options = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(ASK, **options).endswith("</think>\n\n")
    thinks = tokenizer.apply_chat_template(ASK, enable_thinking=True, **options)
    assert thinks.endswith("assistant\n")


def test_later_arguments_win_over_those_that_a_template_has_from_before(
    tokenizer_directory,
) -> None:
    exported = loaded(tokenizer_directory, DATED, date_string="2026-01-01").chat_template
    again = loaded(tokenizer_directory, exported, date_string="2027-02-02")
    assert "Today: 2027-02-02" in again.apply_chat_template(ASK, tokenize=False)


def test_a_saved_tokenizer_gives_the_same_ids_in_plain_transformers(
    tokenizer_directory, tmp_path
) -> None:
    tokenizer = loaded(tokenizer_directory, THINKING, enable_thinking=False)
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    ids = saved.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    other = AutoTokenizer.from_pretrained(tokenizer_directory)
    expected = other.apply_chat_template(
        ASK,
        chat_template=THINKING,
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    assert ids == expected
    assert ids != other.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)


def test_several_named_templates_all_get_them(tokenizer_directory, tmp_path) -> None:
    tokenizer = load_tokenizer(ModelSection(path=str(tokenizer_directory)))
    tokenizer.chat_template = {"default": THINKING, "tool_use": "tools " + THINKING}
    tokenizer.save_pretrained(tmp_path)
    named = load_tokenizer(
        ModelSection(path=str(tmp_path)), chat_template_args={"enable_thinking": False}
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools, start in ((None, "<|im_start|>user"), ([tool], "tools<|im_start|>user")):
        text = named.apply_chat_template(
            ASK, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert text.startswith(start)
        assert text.endswith("</think>\n\n")


def test_an_argument_that_the_template_does_not_read_is_refused_with_those_that_it_reads(
    tokenizer_directory,
) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tokenizer_directory, DATED, date="2026-01-01")
    assert "data.chat_template_args.date;" in error.value.message
    assert "'date_string', 'place'" in error.value.message
    with pytest.raises(ConfigError, match=r"\.enable_thinking;") as error:
        load_tokenizer(
            ModelSection(path=str(tokenizer_directory)),
            chat_template_args={"enable_thinking": False},
        )
    assert str(tokenizer_directory) in error.value.message
    assert "model.chat_template" in str(error.value.hint)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "strftime_now"])
def test_what_transformers_itself_gives_to_a_template_is_no_argument(
    tokenizer_directory, name
) -> None:
    template = DATED + "{% if add_generation_prompt %}{% endif %}"
    with pytest.raises(ConfigError, match=rf"chat_template_args\.{name};"):
        loaded(tokenizer_directory, template, **{name: "x"})


def test_a_template_that_jinja_can_not_read_is_refused(tokenizer_directory) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template .*Jinja"):
        loaded(tokenizer_directory, "{% for m in messages %}{{ x }}", x=1)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=8,
)
_STRANGE = st.sampled_from(["{% raw %}", "%}", "{{ x }}", "'\"\\", "-%}\n", "{#", "\x85\u2028\r\n"])


@given(value=_JSON | _STRANGE)
def test_every_json_value_reaches_the_template_unchanged(value) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = with_arguments("\n  {{ value | tojson }}", {"value": value}, of="a test")
    texts, _ = render_jinja_template([ASK], chat_template=template)
    assert texts == [f"\n  {json.dumps(value, ensure_ascii=False)}"]


def test_prompts_are_rendered_with_them(tokenizer_directory, write) -> None:
    tokenizer = loaded(tokenizer_directory, THINKING, enable_thinking=False)
    section = DataSection(chat_template_args={"enable_thinking": False})
    source = files_source()
    path = write("x.jsonl", [{"prompt": ASK}, {"prompt": ASK}])
    prompts = load_prompts(source, [path], tokenizer, section, ModelSection(path="m")).prompts
    plain = loaded(tokenizer_directory, THINKING)
    expected = plain.apply_chat_template(
        ASK, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    for prompt in prompts:
        np.testing.assert_array_equal(prompt.prompt_ids, expected)


def test_raw_prompts_refuse_arguments_that_would_have_no_effect(tokenizer_directory, write) -> None:
    tokenizer = loaded(tokenizer_directory, THINKING, enable_thinking=False)
    section = DataSection(chat_template_args={"enable_thinking": False}, plain_prompts="raw")
    source = files_source()
    path = write("x.jsonl", [{"prompt": "2 + 2 ="}])
    with pytest.raises(ConfigError, match=r"data\.plain_prompts=raw"):
        load_prompts(source, [path], tokenizer, section, ModelSection(path="m"))


@pytest.mark.parametrize("value", [float("nan"), b"bytes", {1, 2}])
def test_an_argument_is_a_json_value(value) -> None:
    with pytest.raises(ValueError, match=r"chat_template_args .*JSON"):
        DataSection(chat_template_args={"x": value})
