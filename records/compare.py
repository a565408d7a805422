"""Compare two states of the project by their recordings: `python records/compare.py BASE PRESENT`.

What agrees between all recordings of the base must be the same, bit for bit, in those of the present. What does not is listed as not
repeatable, and does not fail. Names that changed since the base are in `renamed.txt`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from scenarios import SCENARIOS, Scenario, chosen

Points = list[tuple[int, Any]]
Records = Mapping[str, list[dict[str, Any]]]
"""Of a state: every scenario's recordings."""

RENAMED = Path(__file__).with_name("renamed.txt")
SHOWN = 12
"""Differences that are shown of a scenario, the earliest steps first."""
SPREADS = 3.0
"""How many times the spread of a state's own recordings the means over steps may differ, where there is a tolerance."""
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """Where a name first differs between two states."""

    name: str
    step: int
    base: str
    present: str


@dataclass
class Result:
    """What a scenario's comparison found."""

    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    not_repeatable: list[str] = field(default_factory=list)
    note: str = ""
    """Why it was not compared."""
    failed: bool = False


def read_renames(text: str) -> dict[str, str | None]:
    """Old names to new ones, from lines `OLD NEW`; `OLD -` is a name that is gone, `- NEW` one that came (kept as its own
    old name with None). A `*` at the end of both stands for the rest of a name.

    Raises:
        ValueError: a line has not two words.
    """
    renames: dict[str, str | None] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ValueError(f"{line!r} is no line of two names; expected OLD NEW, OLD - or - NEW")
        old, new = words
        # Names that came are kept apart from names of the base: the base may have one of them later.
        renames[f"- {new}" if old == "-" else old] = None if "-" in (old, new) else new
    return renames


def renamed(name: str, renames: Mapping[str, str | None]) -> str | None:
    """What a name of the base is called now; None where it is not compared. The longest entry that fits counts."""
    for old in sorted(renames, key=len, reverse=True):
        new = renames[old]
        if old.startswith("- "):
            continue
        if old == name:
            return new
        if old.endswith("*") and name.startswith(old[:-1]):
            return None if new is None else new.removesuffix("*") + name[len(old) - 1 :]
    return name


def read_state(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Every scenario's recordings below a directory that `run.py` wrote."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(directory.glob("*/*.json")):
        found.setdefault(file.stem, []).append(json.loads(file.read_text()))
    return found


def bits(value: Any) -> Any:
    """What is equal where values are the same bit for bit: -0.0 is not 0.0, an int is its float."""
    return float(value).hex() if isinstance(value, int | float) else value


def first_difference(name: str, base: Points, present: Points) -> Difference | None:
    """The first point at which two series differ."""
    for i in range(max(len(base), len(present))):
        one = base[i] if i < len(base) else None
        other = present[i] if i < len(present) else None
        if one and other and one[0] == other[0] and bits(one[1]) == bits(other[1]):
            continue
        step = min(point[0] for point in (one, other) if point)
        at_step = [shown(p[1]) if p and p[0] == step else ABSENT for p in (one, other)]
        return Difference(name, step, *at_step)
    return None


def shown(value: Any) -> str:
    """A value as text, a digest by its beginning."""
    if isinstance(value, str):
        return value if len(value) <= 24 else f"{value[:12]}…"
    return "null" if value is None else repr(value)


def compare_scenario(
    base: list[dict[str, Any]],
    present: list[dict[str, Any]],
    renames: Mapping[str, str | None],
    scenario: Scenario | None = None,
) -> Result:
    """Compare the recordings of one scenario."""
    if (result := _not_recorded(base, present)) is not None:
        return result
    result = Result(differences=_other_versions(base[0]["versions"], present[0]["versions"]))
    exact = scenario.exact if scenario else ("*",)
    tolerances = scenario.tolerances if scenario else {}
    followed = {old: renamed(old, renames) for old in _names(base)}
    for old, name in followed.items():
        if name is None:
            continue
        series = [record["series"].get(old, []) for record in base]
        now = [record["series"].get(name, []) for record in present]
        if name in tolerances:
            _compare_means(result, name, series, now, tolerances[name].floor)
        elif any(fnmatchcase(name, pattern) for pattern in exact):
            _compare_bits(result, name, series, now)
    for name in _names(present):
        if name not in followed.values() and not _came(name, renames):
            step, value = next(r["series"][name] for r in present if name in r["series"])[0]
            result.differences.append(Difference(name, step, ABSENT, shown(value)))
    result.differences.sort(key=lambda difference: (difference.step, difference.name))
    if not (result.compared or result.differences):
        result.note = "nothing was compared: no name repeats in the base"
    result.failed = bool(result.differences or result.note)
    return result


def _came(name: str, renames: Mapping[str, str | None]) -> bool:
    """Whether a name of the present is one that the base lacks, as `renames` says."""
    return any(fnmatchcase(name, key[2:]) for key in renames if key.startswith("- "))


def _not_recorded(base: list[dict[str, Any]], present: list[dict[str, Any]]) -> Result | None:
    """Why there is nothing to compare: a failure, unless both states skipped the scenario or it is new; None where there is."""
    if not base:
        return Result(note="new: the base has no such scenario")
    lacking = {"status": "missing", "reason": "there is no recording"}
    found = [
        (state, record["status"], record["reason"])
        for state, records in (("base", base), ("present", present or [lacking]))
        for record in records
        if record["status"] != "recorded"
    ]
    if not found:
        return None
    state, status, reason = next((f for f in found if f[1] != "skipped"), found[0])
    alike = {state for state, _, _ in found} == {"base", "present"}
    failed = status != "skipped" or not alike
    return Result(note=f"{status} in the {state}: {reason}", failed=failed)


def _other_versions(base: dict[str, str], present: dict[str, str]) -> list[Difference]:
    """Packages that compute, of which the states had other versions: nothing else can agree then."""
    return [
        Difference(f"version/{name}", 0, base.get(name, ABSENT), present.get(name, ABSENT))
        for name in sorted(base | present)
        if base.get(name) != present.get(name)
    ]


def _names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record["series"]))


def _compare_bits(result: Result, name: str, base: list[Points], present: list[Points]) -> None:
    if any(first_difference(name, base[0], other) for other in base[1:]):
        result.not_repeatable.append(name)
        if not all(present):
            result.differences.append(Difference(name, 0, "not repeatable", ABSENT))
        return
    result.compared += 1
    found = (first_difference(name, base[0], other) for other in present)
    if difference := next(filter(None, found), None):
        result.differences.append(difference)


def _compare_means(
    result: Result, name: str, base: list[Points], present: list[Points], floor: float
) -> None:
    """Compare means over steps, averaged over a state's recordings, within what the base's recordings themselves differ by."""
    result.compared += 1
    for points in (*base[1:], *present):
        known, found = ([(step, value is None) for step, value in p] for p in (base[0], points))
        if known != found or not points:
            result.differences.append(
                Difference(name, 0, f"{len(known)} steps", f"{len(found)} steps, or null elsewhere")
            )
            return
    means = [
        [fmean(value for _, value in points if value is not None) for points in state]
        for state in (base, present)
        if any(value is not None for _, value in state[0])
    ]
    if not means:
        return
    limit = max(floor, SPREADS * (max(means[0]) - min(means[0])))
    one, other = map(fmean, means)
    if not abs(one - other) <= limit:  # NaN too is a difference.
        result.differences.append(
            Difference(name, 0, f"mean {one:.6g}", f"{other:.6g}, more than {limit:.2g} apart")
        )


def compare(
    base: Records, present: Records, renames: Mapping[str, str | None]
) -> dict[str, Result]:
    """Compare every scenario of two states."""
    names = [*base, *(name for name in present if name not in base)]
    return {
        name: compare_scenario(
            base.get(name, []), present.get(name, []), renames, SCENARIOS.get(name)
        )
        for name in names
    }


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as text, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def report(results: Mapping[str, Result], limit: int | None = SHOWN) -> str:
    """What differs, and then every scenario in a line."""
    rows: list[tuple[str, ...]] = [("scenario", "name", "step", "base", "present")]
    for scenario, result in results.items():
        rows += [
            (scenario, found.name, str(found.step), found.base, found.present)
            for found in result.differences[:limit]
        ]
        if limit is not None and len(result.differences) > limit:
            rows.append((scenario, f"and {len(result.differences) - limit} more", "", "", ""))
    scenarios: list[tuple[str, ...]] = [("scenario", "result", "compared", "not repeatable")]
    for scenario, result in results.items():
        word = f"{len(result.differences)} differ" if result.differences else "agrees"
        unsteady = ", ".join(result.not_repeatable[:4])
        more = f" and {len(result.not_repeatable) - 4} more"
        unsteady += more if len(result.not_repeatable) > 4 else ""
        scenarios.append((scenario, result.note or word, str(result.compared or ""), unsteady))
    return "\n\n".join(table(part) for part in (rows, scenarios) if len(part) > 1)


def main() -> int:
    """Compare two directories; the exit status is 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, help="recordings of the base")
    parser.add_argument("present", type=Path, help="recordings of the present")
    parser.add_argument("--scenarios", nargs="*", default=[], help="names, or beginnings of them")
    parser.add_argument("--all", action="store_true", help="show every difference")
    arguments = parser.parse_args()
    states = [read_state(arguments.base), read_state(arguments.present)]
    if arguments.scenarios:
        wanted = {scenario.name for scenario in chosen(arguments.scenarios)}
        states = [{k: v for k, v in state.items() if k in wanted} for state in states]
    if not all(states):
        sys.exit("there are no recordings to compare; expected DIR/N/SCENARIO.json in both")
    results = compare(states[0], states[1], read_renames(RENAMED.read_text()))
    print(report(results, None if arguments.all else SHOWN))
    return int(any(result.failed for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
