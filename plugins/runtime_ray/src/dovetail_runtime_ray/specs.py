"""Worker specs that are sent to a process of another Python environment.

A sent spec contains only Python's own types, NumPy arrays and classes of core, the runtime and the plugin's config, and no
object of another library.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from dovetail.interfaces import WorkerSpec
from dovetail.sections import ModelSection
from dovetail_datasets import load_tokenizer


@attrs.frozen(kw_only=True)
class TokenizerOf:
    """Placeholder for a tokenizer that is sent to another environment and loaded again there."""

    model: ModelSection
    chat_template: str | Mapping[str, str] | None = None
    """The run's chat template, with `data.chat_template_args` as default values; None for that of the loaded tokenizer."""


def spec_to_send(spec: WorkerSpec) -> WorkerSpec:
    """Return the spec for a process in another Python environment: the tokenizer is replaced by its name."""
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
    """Restore a spec from the result of `spec_to_send`.

    Raises:
        ModelError: the tokenizer can't be loaded here.
    """
    named = spec.context.tokenizer
    if not isinstance(named, TokenizerOf):
        return spec
    tokenizer = load_tokenizer(attrs.evolve(named.model, chat_template=None))
    if named.chat_template is not None:
        tokenizer.chat_template = named.chat_template
    return attrs.evolve(spec, context=attrs.evolve(spec.context, tokenizer=tokenizer))
