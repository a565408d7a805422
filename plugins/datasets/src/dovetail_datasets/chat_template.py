"""Arguments of chat templates, written into the template as defaults, so that every program that reads it renders the same text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node, Template
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.errors import ConfigError, nearest
from dovetail.interfaces import Tokenizer

KEY = "data.chat_template_args"

_SET_BY_TRANSFORMERS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt"),
        *("raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
        *("mask_token", "additional_special_tokens"),
    }
)
"""Variables that `apply_chat_template` sets for every template, so that a default in the template would have no effect."""


def with_arguments(
    template: str, arguments: Mapping[str, Any], *, of: str, special: Collection[str] = ()
) -> str:
    """Return a chat template with default values for these arguments.

    Each argument becomes a line before the template, `{%- set NAME = NAME if NAME is defined else VALUE %}`, so that a saved tokenizer
    renders in the same way wherever it is loaded.

    Args:
        template: a Jinja template.
        arguments: JSON values by name.
        of: the model or tokenizer that has the template, as text for the error.
        special: names of the tokenizer's special tokens, which transformers passes to the template.

    Raises:
        ConfigError: the template does not read one of the arguments, or is not a Jinja template.
    """
    if not arguments:
        return template
    read = sorted(_undeclared(template, of) - _SET_BY_TRANSFORMERS - set(special))
    for name in arguments:
        if name not in read:
            close = nearest(name, read)
            taken = f"it reads {', '.join(map(repr, read))}" if read else "it reads no arguments"
            raise ConfigError(
                f"the chat template of {of} does not read {KEY}.{name}; {taken}",
                hint=f"did you mean {close!r}?"
                if close
                else f"leave {KEY}.{name} out, or set model.chat_template to a template that reads it",
            )
    # Python literals of JSON values are also Jinja literals. Jinja drops the newline after a block (`trim_blocks`).
    lines = [
        f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}\n"
        for name, value in _plain(arguments).items()
    ]
    return "".join(lines) + template


def set_arguments(tokenizer: Tokenizer, arguments: Mapping[str, Any], *, of: str) -> None:
    """Set default values for arguments of a tokenizer's chat template. A tokenizer without a template is unchanged.

    If there are several named templates, all get the defaults, and the one named `default` must read the arguments.

    Raises:
        ConfigError: see `with_arguments`.
    """
    given = getattr(tokenizer, "chat_template", None)
    if not arguments or not given:
        return
    special = tuple(tokenizer.special_tokens_map)
    if isinstance(given, str):
        tokenizer.chat_template = with_arguments(given, arguments, of=of, special=special)
        return
    default = given.get("default", "")
    lines = with_arguments(default, arguments, of=of, special=special).removesuffix(default)
    tokenizer.chat_template = {name: lines + template for name, template in given.items()}


class GenerationExtension(Extension):
    """The Jinja block `generation` of transformers, which marks the assistant's text; for parsing templates, not for rendering."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("generation"), [], [], body).set_lineno(line)


def parse_template(template: str, of: str) -> Template:
    """Return the syntax tree of a chat template.

    Args:
        template: a Jinja template.
        of: the model or tokenizer that has the template, as text for the error.

    Raises:
        ConfigError: the text is not a Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(
        extensions=["jinja2.ext.loopcontrols", GenerationExtension]
    )
    try:
        environment.compile(template)  # unlike `parse`, raises for unknown filters and tests
        return environment.parse(template)
    except TemplateError as error:
        line = f"line {lineno}: " if (lineno := getattr(error, "lineno", None)) else ""
        raise ConfigError(
            f"the chat template of {of} is not a Jinja template: {line}{error.message}",
            hint="correct the template, or set model.chat_template to another one",
        ) from error


def _undeclared(template: str, of: str) -> set[str]:
    """Return the names that a template reads without setting them first."""
    return find_undeclared_variables(parse_template(template, of))


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(arguments)))
