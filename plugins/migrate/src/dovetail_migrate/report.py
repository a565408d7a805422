"""The report of an import: every given key, by outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from dovetail_migrate.draft import Draft, KeyOutcome

_TITLES = {
    KeyOutcome.UNKNOWN: "unknown",
    KeyOutcome.REFUSED: "refused: Dovetail can't do what the key asks for",
    KeyOutcome.CHANGED: "changed",
    KeyOutcome.MAPPED: "mapped",
    KeyOutcome.UNNEEDED: "not needed here",
}


@attrs.frozen
class KeyReport:
    """The result of the import for one given key."""

    key: str
    """The key as it was written."""
    value: Any
    outcome: KeyOutcome
    ours: str = ""
    our_value: Any = None
    why: str = ""

    def line(self) -> str:
        """Return the result as a line of the report."""
        said = f"{self.key} = {shown(self.value)}"
        if self.ours:
            said += f"  →  {self.ours}" + ("" if self.our_value is None else f" = {shown(self.our_value)}")  # fmt: skip
        return said + (f"  ({self.why})" if self.why else "")


@attrs.frozen(kw_only=True)
class ImportReport:
    """The results of an import for all given keys, and notes on the whole job."""

    keys: tuple[KeyReport, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on the whole job: keys given twice, the other system's version, and how many of its defaults the config sets."""

    def count(self, outcome: KeyOutcome) -> int:
        """Return the number of keys with this outcome."""
        return sum(each.outcome is outcome for each in self.keys)

    @property
    def importable(self) -> bool:
        """Whether the whole config can be written without `--partial`."""
        missing = (KeyOutcome.REFUSED, KeyOutcome.UNKNOWN)
        return not self.problems and not any(self.count(outcome) for outcome in missing)

    def lines(self) -> Iterator[str]:
        """Yield the report's lines; problems and notes first, then the keys by outcome."""
        counts = [f"{count} {each}" for each in KeyOutcome if (count := self.count(each))]
        yield f"{len(self.keys)} key{'s' * (len(self.keys) != 1)}: {', '.join(counts) or 'none given'}"
        yield from (f"! {problem}" for problem in self.problems)
        yield from (f"  {note}" for note in self.notes)
        for outcome, title in _TITLES.items():
            found = [each for each in self.keys if each.outcome is outcome]
            if found:
                yield ""
                yield f"{title} ({len(found)})"
                yield from (f"  {each.line()}" for each in found)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "schema": 1,
            "keys": [attrs.asdict(each) for each in self.keys],
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


def report_on(given: Mapping[str, tuple[str, Any]], draft: Draft, notes: list[str]) -> ImportReport:
    """Return the report on the given keys of a draft.

    Args:
        given: the spelling and the value of each key as the user gave them, by the key's name in the findings (`KeyFinding.theirs`).
        draft: the draft with its findings.
        notes: further notes for the reader.
    """
    keys = []
    for key, (spelled, value) in given.items():
        finding = draft.outcome_of(key)
        assert finding is not None, f"{key} was given and not judged"
        ours = finding.value if finding.outcome is KeyOutcome.CHANGED else None
        keys.append(KeyReport(spelled, value, finding.outcome, finding.ours, ours, finding.why))
    written = [f for f in draft.findings if f.ours and f.theirs not in given and draft.values.get(f.ours) == f.value]  # fmt: skip
    if written:
        notes = [*notes, f"the config sets {len(written)} further keys to the other system's defaults"]  # fmt: skip
    return ImportReport(keys=tuple(keys), problems=tuple(draft.problems), notes=tuple(notes))


def shown(value: Any) -> str:
    """Return a value as YAML would write it, shortened."""
    text = "null" if value is None else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 60 else f"{text[:57]}…"
