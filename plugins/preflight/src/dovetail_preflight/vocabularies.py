"""A rule about token ids: every model of a run must assign them the same tokens as the run's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from dovetail.errors import ModelError
from dovetail.interfaces import Finding, Tokenizer
from dovetail.planning import ModelRole, Plan
from dovetail.sections import ModelSection, RunConfig
from dovetail_datasets import model_directory

_SHOWN = 3
"""Maximum number of tokens that a finding names."""


@attrs.frozen(kw_only=True)
class _Vocabulary:
    """The tokens of a tokenizer, with their ids."""

    ids: Mapping[str, int]
    added: frozenset[str]
    """Tokens that were added after the tokenizer was trained: special tokens, and tokens of a chat template."""
    needed: frozenset[str]
    """Added tokens that samples certainly or probably contain: end-of-sequence tokens, and tokens in the chat template."""

    def below(self, rows: int | None) -> _Vocabulary:
        """Return the vocabulary without tokens whose id is `rows` or larger; the whole vocabulary if `rows` is None."""
        if rows is None:
            return self
        return attrs.evolve(self, ids={t: n for t, n in self.ids.items() if n < rows})


def vocabulary_differs(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report a model (policy, reference or critic) whose token ids mean other tokens than in the run's tokenizer.

    The outputs of such a model mean nothing. The rule yields an error or a warning for each such model.

    A sample can contain every id of the run's tokenizer for which the policy has an embedding. A reference or a critic must have an
    embedding for each of these ids. Missing embeddings are an error for tokens of the trained vocabulary, the end-of-sequence token, and
    tokens that the chat template writes. Missing embeddings of other added tokens are a warning, since samples need not contain these
    tokens. If the policy itself lacks an embedding, this is no finding for other added tokens, nor for tokens to which the policy's own
    tokenizer gives the same id.

    A model's own tokenizer must give the same ids to the same tokens as the run's tokenizer. A difference is an error for tokens of the
    trained vocabulary, and a warning for added tokens. Padding rows of an embedding are ignored. Models that are not on this machine are
    not checked, and tokenizers that do not list their tokens are not compared.
    """
    section = config.model
    given = section.tokenizer_path or section.path
    home, policy = model_directory(given, section), model_directory(section.path, section)
    others = [
        (role, place)
        for role in (plan.models if plan is not None else ())
        if role.role == "actor" or role.path != section.path
        if (place := model_directory(role.path, section)) is not None and place != home
    ]
    template = section.chat_template
    own = _vocabulary(home, section, template) if others and home is not None else None
    if own is None:
        return  # an error of the run's tokenizer is reported when it is loaded
    tokenizer = f"model.{'tokenizer_path' if section.tokenizer_path else 'path'} = {given}"
    # Samples contain no tokens for which the policy has no embedding.
    sampled = own.below(_rows(section) if policy is not None else None)
    for role, place in others:
        meant = own if role.role == "actor" else sampled
        yield from _judge(role, place, meant, tokenizer, config.model_section(role.role))


def _judge(
    role: ModelRole, place: Path, own: _Vocabulary, tokenizer: str, section: ModelSection
) -> Iterator[Finding]:
    """Yield the most serious finding about a model, if any.

    Args:
        role: the model's role.
        place: the directory with the model's own tokenizer.
        own: the tokens of the run's tokenizer that the model must support.
        tokenizer: the key and the value that select the run's tokenizer, for messages.
        section: the section of the model's config.
    """
    model = f"{_key(role)} = {role.path}"
    theirs, rows = _vocabulary(place, section), _rows(section)
    there = theirs.ids if theirs is not None else {}
    moved = [t for t, n in own.ids.items() if theirs is not None and there.get(t) != n]
    trained = [token for token in moved if token not in own.added]
    beyond = [t for t, n in own.ids.items() if rows is not None and n >= rows]
    if role.role == "actor":
        # Ids beyond the embeddings are accepted if the actor's own tokenizer has them too.
        beyond = [t for t in beyond if there.get(t) != own.ids[t]]
    grave = [t for t in beyond if t not in own.added or t in own.needed]
    if trained and theirs is not None:
        yield Finding.error(
            f"{model} has another tokenizer than the run ({tokenizer}): {len(trained):,} of the run's "
            f"{len(own.ids):,} tokens have another id or no id in the model, such as {_shown(trained, own, theirs)}",
            hint=_mend(role),
        )
    elif grave or (beyond and role.role != "actor"):
        find = Finding.error if grave else Finding.warning
        yield find(
            f"{model} has embeddings for {rows:,} token ids, but the run's tokenizer ({tokenizer}) gives larger ids to "
            f"{_count(grave or beyond)}, such as {_shown(grave or beyond, own)}: the model can't read samples with these tokens",
            hint=_mend(role),
        )
    elif moved and theirs is not None:
        yield Finding.warning(
            f"{model} lacks tokens that were added to the run's tokenizer ({tokenizer}): "
            f"{_count(moved)} {'has' if len(moved) == 1 else 'have'} another id or no id in the model, such as "
            f"{_shown(moved, own, theirs)}; the model's outputs for samples with these tokens are unreliable",
            hint=_mend(role),
        )


def _vocabulary(
    directory: Path, section: ModelSection, template: str | None = None
) -> _Vocabulary | None:
    """Return the vocabulary of a directory's tokenizer; None if its tokens can't be listed.

    Args:
        directory: the directory of the tokenizer.
        section: the section of the model's config.
        template: the chat template; None takes the tokenizer's own.
    """
    from dovetail_datasets import load_tokenizer

    there = attrs.evolve(section, path=str(directory), tokenizer_path=None, chat_template=template)
    try:
        tokenizer = load_tokenizer(there)
    except ModelError:
        return None
    if not hasattr(tokenizer, "get_added_vocab"):
        return None  # such as mistral-common's, which does not tell added tokens apart
    added = frozenset(tokenizer.get_added_vocab())
    return _Vocabulary(
        ids=tokenizer.get_vocab(), added=added, needed=frozenset(_needed(tokenizer, added))
    )


def _needed(tokenizer: Tokenizer, added: frozenset[str]) -> Iterator[str]:
    """Yield the added tokens that end a sequence or that the chat template writes, as text or by the variable `bos_token`."""
    templates = tokenizer.chat_template or ""
    text = templates if isinstance(templates, str) else "\n".join(templates.values())
    yield from (token for token in added if token == tokenizer.eos_token or token in text)
    if tokenizer.bos_token in added and "bos_token" in text:
        yield tokenizer.bos_token


def _rows(section: ModelSection) -> int | None:
    """Return the number of a model's token embeddings; None if the model can't be read."""
    from dovetail_datasets import read_shape

    try:
        # With the path as in the config, for which other rules have cached the shape.
        return read_shape(section).vocabulary
    except ModelError:
        return None


def _key(role: ModelRole) -> str:
    return "model.path" if role.role == "actor" else f"{role.key}.path"


def _count(tokens: list[str]) -> str:
    return f"{len(tokens):,} token{'' if len(tokens) == 1 else 's'}"


def _shown(tokens: list[str], own: _Vocabulary, theirs: _Vocabulary | None = None) -> str:
    """Return the tokens with the smallest ids as text, each with its id, and with its id in `theirs` if given."""
    first = sorted(tokens, key=own.ids.__getitem__)[:_SHOWN]
    if theirs is None:
        return ", ".join(f"{token!r} ({own.ids[token]})" for token in first)
    return ", ".join(
        f"{t!r} ({own.ids[t]}, in the model {theirs.ids.get(t, 'none')})" for t in first
    )


def _mend(role: ModelRole) -> str:
    if role.role == "actor":
        return "leave model.tokenizer_path out to use the model's own tokenizer, or set it to a tokenizer that the model was trained with"
    return f"set {_key(role)} to a model with the policy's tokenizer, or leave it out to use model.path"
