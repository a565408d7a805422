"""The faults of a dataset: bad rows, duplicates, overlap, lengths, templates that leave out content, answers that the reward refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice

from dovetail.errors import DovetailError
from dovetail.interfaces import Prompt
from dovetail_datasets.commands.opened import OpenedData, examples_of
from dovetail_datasets.example_rows import Example
from dovetail_datasets.prompts import PromptSet

SHOWN = 10
"""Maximum number of rows named for one fault."""
SCORED = 256
"""The number of rows, from the first, whose reference answers are scored."""


def faults_of(opened: OpenedData) -> Iterator[str]:
    """Yield each fault of the opened data, with the rows that have it."""
    data = opened.data
    for what, rows in (("training", data.train), ("held-out", data.val)):
        if rows is None:
            continue
        named = f"{what} {data.rows_are}"
        yield from _named(f"bad {named}, which no run trains on", [row.message for row in rows.bad])
        if isinstance(rows, PromptSet):
            yield from _counted(rows, named, data.limits)
        yield from (f"{named}: {note}" for note in rows.left_out)
        yield from _named(f"duplicates among {named}", _duplicates(examples_of(rows)))
    if data.val is not None:
        there = {_digest(prompt, whole=False): prompt for prompt in examples_of(data.train)}
        both = ((p, there.get(_digest(p, whole=False))) for p in examples_of(data.val))
        overlap = [f"{mine} has the prompt of {other}" for mine, other in both if other]
        yield from _named("held-out rows that are trained on", overlap)
    yield from _refused(opened)


def _counted(rows: PromptSet, named: str, limits: str) -> Iterator[str]:
    """Yield a sentence each on rows left out as too long, rows that are cut, and control tokens (such as `<|im_end|>`) in their texts.

    Args:
        rows: the rows.
        named: the plural noun for the rows, for messages.
        limits: the length limits, as text for messages.
    """
    if rows.filtered_overlong:
        yield f"{rows.filtered_overlong:,} {named} are longer than {limits} and left out"
    if rows.truncated.rows:
        yield f"{named} are cut to {limits}: {rows.truncated}"
    if rows.spelled:
        yield f"the texts of {named} contain {rows.spelled:,} control tokens, such as an end of turn"


def _refused(opened: OpenedData) -> Iterator[str]:
    """Yield one fault that names the rows whose reference answer does not get the full score; or the reward's error if scoring fails.

    The first `SCORED` rows are scored. The full score is the highest score among their reference answers; a score must also be above 0.
    """
    try:
        verdicts = [*opened.verdicts(islice(opened.rows(0), SCORED))]
    except DovetailError as error:
        yield f"reward: {error.message}"
        return
    best = max((each.score for each in verdicts if each.score is not None), default=0.0)
    refused = [
        f"{each.where}: {each.text}"
        for each in verdicts
        if each.score is None or each.score < best or each.score <= 0
    ]
    yield from _named("reference answers that the reward refuses", refused)


def _duplicates(prompts: Iterator[Prompt]) -> list[str]:
    first: dict[bytes, str] = {}
    found = []
    for prompt in prompts:
        digest = _digest(prompt, whole=True)
        if digest in first:
            found.append(f"{prompt} is {first[digest]} again")
        first.setdefault(digest, str(prompt))
    return found


def _digest(prompt: Prompt, *, whole: bool) -> bytes:
    """Return the digest of a row's tokens and images; `whole` includes its answers."""
    digest = hashlib.blake2b(prompt.prompt_ids.tobytes(), digest_size=16)
    for reference in prompt.media:
        digest.update(reference.digest.encode())
    for answer in prompt.answers if whole and isinstance(prompt, Example) else ():
        digest.update(answer.ids.tobytes() + answer.mask.tobytes())
    return digest.digest()


def _named(what: str, rows: list[str]) -> Iterator[str]:
    if rows:
        more = [f"and {len(rows) - SHOWN:,} more"] if len(rows) > SHOWN else []
        yield "\n  ".join([f"{len(rows):,} {what}:", *rows[:SHOWN], *more])
