"""A rule about token ids: every model of a run is to read them as the run's tokenizer means them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from dovetail.config.sections import ModelSection, RunConfig
from dovetail.errors import ModelError
from dovetail.interfaces.preflight import Finding, PreflightRule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.flow.plan import Plan
    from dovetail.flow.stages import ModelRole

_SHOWN = 3
"""Tokens that a finding names."""


@attrs.frozen(kw_only=True)
class _Vocabulary:
    """What a tokenizer's ids mean."""

    ids: Mapping[str, int]
    added: frozenset[str]
    """Those that came after it was trained: special tokens, and a chat template's."""

    def below(self, rows: int | None) -> _Vocabulary:
        """Without ids from `rows` on."""
        if rows is None:
            return self
        return attrs.evolve(self, ids={t: n for t, n in self.ids.items() if n < rows})


class VocabularyDiffers(PreflightRule):
    """A reference, a critic or the policy would read other tokens than the run's tokenizer means: its figures say nothing.

    A model has to have embeddings for all ids that the tokenizer gives. Where it comes with a tokenizer of its own, the two have
    to give the same ids to the same tokens: an error where those of the trained vocabulary differ, a warning where only added
    tokens do. Rows that pad an embedding mean nothing. Models that are not on this machine are not looked at.
    """

    name = "vocabulary_differs"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        section = config.model
        given = section.tokenizer_path or section.path
        home, policy = _directory(given, section), _directory(section.path, section)
        others = [
            (role, place)
            for role in (plan.models if plan is not None else ())
            if role.role == "actor" or role.path != section.path
            if (place := _directory(role.path, section)) is not None and place != home
        ]
        own = _vocabulary(home, section) if others and home is not None else None
        if own is None:
            return  # whoever reads the run's tokenizer says what is wrong with it
        tokenizer = f"model.{'tokenizer_path' if section.tokenizer_path else 'path'} = {given}"
        # What the policy has no embedding for is in no sample.
        sampled = own.below(_rows(policy, section) if policy is not None else None)
        for role, place in others:
            meant = own if role.role == "actor" else sampled
            yield from self._judge(role, place, meant, tokenizer, section)

    def _judge(
        self, role: ModelRole, place: Path, own: _Vocabulary, tokenizer: str, section: ModelSection
    ) -> Iterator[Finding]:
        """At most one finding about one model: the gravest."""
        model = f"{_key(role)} = {role.path}"
        theirs, rows = _vocabulary(place, section), _rows(place, section)
        moved = [t for t, n in own.ids.items() if theirs is not None and theirs.ids.get(t) != n]
        trained = [token for token in moved if token not in own.added]
        beyond = [t for t, n in own.ids.items() if rows is not None and n >= rows]
        if trained and theirs is not None:
            yield self.error(
                f"{model} reads other tokens than the run's tokenizer ({tokenizer}) writes: {len(trained):,} of "
                f"{len(own.ids):,} tokens have another id there, or none, such as {_shown(trained, own, theirs)}",
                hint=_mend(role),
            )
        elif beyond:
            yield self.error(
                f"{model} has embeddings for {rows:,} token ids, and the run's tokenizer ({tokenizer}) gives larger ones to "
                f"{_count(beyond)}, such as {_shown(beyond, own)}: it can't read a sample with one",
                hint=_mend(role),
            )
        elif moved and theirs is not None:
            yield self.warning(
                f"{model} knows the run's trained tokens, and not all that were added to its tokenizer ({tokenizer}): "
                f"{_count(moved)} {'has' if len(moved) == 1 else 'have'} another id there, or none, such as "
                f"{_shown(moved, own, theirs)}; what it says of samples with them is of little worth",
                hint=_mend(role),
            )


def _directory(path: str, section: ModelSection) -> Path | None:
    """Where a model or a tokenizer lies on this machine: its directory, or the hub's cache of it; None where it does not."""
    # What is wrong with a path is said where it is read.
    with suppress(OSError, RuntimeError, ValueError):
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=section.revision)
        return Path(cached).parent if isinstance(cached, str) else None
    return None


def _vocabulary(directory: Path, section: ModelSection) -> _Vocabulary | None:
    """Of the tokenizer in a directory; None where it holds none that can be read."""
    from dovetail.data.tokenizer import load_tokenizer

    there = attrs.evolve(section, path=str(directory), tokenizer_path=None, chat_template=None)
    try:
        tokenizer = load_tokenizer(there)
    except ModelError:
        return None
    return _Vocabulary(ids=tokenizer.get_vocab(), added=frozenset(tokenizer.get_added_vocab()))


def _rows(directory: Path, section: ModelSection) -> int | None:
    """How many token ids the model in a directory has embeddings for; None where it can't be read."""
    from dovetail.flow.model_shape import read_shape

    try:
        return read_shape(section, str(directory)).vocabulary
    except ModelError:
        return None


def _key(role: ModelRole) -> str:
    return "model.path" if role.role == "actor" else f"{role.role}.path"


def _count(tokens: list[str]) -> str:
    return f"{len(tokens):,} token{'' if len(tokens) == 1 else 's'}"


def _shown(tokens: list[str], own: _Vocabulary, theirs: _Vocabulary | None = None) -> str:
    """The first of them by id, with what they are elsewhere where that is to be compared."""
    first = sorted(tokens, key=own.ids.__getitem__)[:_SHOWN]
    if theirs is None:
        return ", ".join(f"{token!r} ({own.ids[token]})" for token in first)
    return ", ".join(f"{t!r} ({own.ids[t]}, there {theirs.ids.get(t, 'none')})" for t in first)


def _mend(role: ModelRole) -> str:
    if role.role == "actor":
        return "leave model.tokenizer_path= out to take the model's own, or set it to a tokenizer that the model was trained with"
    return f"set {_key(role)}= to a model with the policy's tokenizer, or leave it out to take model.path"
