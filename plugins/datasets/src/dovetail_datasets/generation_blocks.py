"""Locates the assistant's text in chat templates with the block `{% generation %}` of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2.nodes import (
    AssignBlock,
    CallBlock,
    ExtensionAttribute,
    FilterBlock,
    Macro,
    Node,
    Template,
)

from dovetail.errors import ConfigError
from dovetail.interfaces import Tokenizer
from dovetail_datasets.chat_template import GenerationExtension, parse_template

Span = tuple[int, int]
"""A span of a text: the offset of its first character, and the offset after its last character."""


def check_blocks(tokenizer: Tokenizer, *, of: str) -> None:
    """Check that all `generation` blocks can be located in rendered text. A tokenizer without a chat template passes.

    transformers locates a block by the length of the text written before it. Text that a `{% set %}` or `{% filter %}` block
    captures is not written yet, so a `generation` block in it can't be located.

    Args:
        tokenizer: a Hugging Face tokenizer.
        of: the tokenizer's model, as text for the error.

    Raises:
        ConfigError: a block is in a macro, in a captured or filtered text, or in another block.
    """
    given = getattr(tokenizer, "chat_template", None) or {}
    for template in given.values() if isinstance(given, Mapping) else [given]:
        tree = parse_template(template, of)
        for outer in tree.find_all((Macro, AssignBlock, FilterBlock, CallBlock)):
            if _blocks_in(outer):
                raise ConfigError(
                    f"the chat template of {of} has a block {{% generation %}} inside another block (line {outer.lineno}), "
                    "so the assistant's text can't be located",
                    hint="set model.chat_template to a template whose {% generation %} blocks are in no macro, {% set %}, {% filter %} or "
                    "{% call %}; or to a template without such blocks",
                )


def template_with_blocks(tokenizer: Tokenizer, tools: object) -> str | None:
    """Return the chat template for messages with these tools if it has `generation` blocks, else None."""
    template: str = tokenizer.get_chat_template(tools=tools)
    return template if _has_blocks(template) else None


def render(
    tokenizer: Tokenizer, template: str, messages: Sequence[Mapping[str, Any]], tools: Any
) -> tuple[str, list[Span]]:
    """Render messages, and return the text with the spans of its `generation` blocks, in order, without empty spans."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    (text,), (spans,) = rendered
    return text, [(start, end) for start, end in spans if start < end]


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return spans with adjacent ones joined."""
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(spans), 1) if a[1] < b[0]), len(spans)]
    return [(spans[a][0], spans[b - 1][1]) for a, b in pairwise(edges) if a < b]


@lru_cache(maxsize=8)
def _has_blocks(template: str) -> bool:
    return bool(_blocks_in(parse_template(template, "the tokenizer")))


def _blocks_in(node: Node | Template) -> list[CallBlock]:
    calls = [(block, block.call.node) for block in node.find_all(CallBlock)]
    return [
        block
        for block, called in calls
        if isinstance(called, ExtensionAttribute)
        and called.identifier == GenerationExtension.identifier
    ]
