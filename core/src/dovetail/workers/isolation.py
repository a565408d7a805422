"""Processes in another Python environment than the controller's: what travels to them, and how the two get acquainted.

Both have dovetail-core, the runtime and the role's plugins, in the same versions; whatever else lies in them may differ.
So what travels is made of Python's own types, NumPy arrays and classes of core, the runtime and the plugin's config:
never what another library has made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from dovetail.interfaces.runtime import WorkerSpec
from dovetail.plugins.isolation import (
    EnvironmentInfo,
    environment_problems,
    facts_here,
    require_environment,
)
from dovetail.sections import ModelSection


@attrs.frozen(kw_only=True)
class TokenizerOf:
    """Stands for a tokenizer on its way to another environment, where it is loaded anew."""

    model: ModelSection
    chat_template: str | Mapping[str, str] | None = None
    """That of the run, with its arguments."""


def spec_to_send(spec: WorkerSpec) -> WorkerSpec:
    """A spec as it travels to another environment: its tokenizer by name."""
    tokenizer, model = spec.context.tokenizer, spec.context.model
    if tokenizer is None:
        return spec
    named: TokenizerOf | None = None
    if model is not None:
        path = model.tokenizer_path or getattr(tokenizer, "name_or_path", None) or model.path
        named = TokenizerOf(
            model=attrs.evolve(model, tokenizer_path=str(path)),
            chat_template=getattr(tokenizer, "chat_template", None),
        )
    return attrs.evolve(spec, context=attrs.evolve(spec.context, tokenizer=named))


def spec_received(spec: WorkerSpec) -> WorkerSpec:
    """What `spec_to_send` made of a spec, whole again.

    Raises:
        ModelError: the tokenizer can't be loaded here.
    """
    named = spec.context.tokenizer
    if not isinstance(named, TokenizerOf):
        return spec
    from dovetail.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(attrs.evolve(named.model, chat_template=None))
    if named.chat_template is not None:
        tokenizer.chat_template = named.chat_template
    return attrs.evolve(spec, context=attrs.evolve(spec.context, tokenizer=tokenizer))


def check_environment(
    controller: Mapping[str, Any], plugins: Iterable[Mapping[str, Any]], *, where: str
) -> None:
    """Compare this process's environment with the controller's.

    Args:
        controller: its `EnvironmentInfo`, as a mapping, for the same plugins.
        plugins: entries of its lock that this process loads.
        where: names this process in the error.

    Raises:
        PluginNeedsError, PluginIncompatibleError: names every difference with both values.
    """
    here = EnvironmentInfo(**controller)
    require_environment(where, environment_problems(here, facts_here(plugins, list(here.packages))))
