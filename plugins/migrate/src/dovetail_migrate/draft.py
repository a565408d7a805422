"""A draft of a Dovetail config, with the outcome for each key of the other system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import attrs
import yaml

from dovetail.config import config_from_mapping
from dovetail.errors import DovetailError
from dovetail.sections import RunConfig


class KeyOutcome(StrEnum):
    """The outcome for a key of the other system, in increasing order of severity."""

    UNNEEDED = "not needed"
    MAPPED = "mapped"
    CHANGED = "changed"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@attrs.frozen
class KeyFinding:
    """The outcome for one key of the other system, with Dovetail's key and value."""

    outcome: KeyOutcome
    theirs: str
    """The other system's key."""
    ours: str = ""
    """Dovetail's key; empty if Dovetail has no such key."""
    value: Any = None
    """Value of Dovetail's key."""
    why: str = ""


@attrs.define
class Draft:
    """A Dovetail config in progress, with the findings on keys of the other system."""

    values: dict[str, Any] = attrs.field(factory=dict)
    comments: dict[str, str] = attrs.field(factory=dict)
    findings: list[KeyFinding] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)
    """Reasons why the job as a whole can't be imported."""

    def put(self, ours: str, value: Any, *theirs: str, why: str = "") -> None:
        """Set the Dovetail key `ours`, which replaces the other system's keys `theirs`; `why`, if given, explains a different meaning."""
        self.values[ours] = value
        if why and theirs:
            self.comments[ours] = f"{theirs[0].rpartition('actor_rollout_ref.')[2]}: {why}"
        outcome = KeyOutcome.CHANGED if why else KeyOutcome.MAPPED
        self.findings += [KeyFinding(outcome, key, ours, value, why) for key in theirs]

    def idle(self, why: str, *theirs: str) -> None:
        """Record keys of the other system that need no counterpart in Dovetail, for the reason `why`."""
        self.findings += [KeyFinding(KeyOutcome.UNNEEDED, key, why=why) for key in theirs]

    def change(self, why: str, *theirs: str) -> None:
        """Record keys of the other system that have no Dovetail key, and whose effect differs in Dovetail as `why` explains."""
        self.findings += [KeyFinding(KeyOutcome.CHANGED, key, why=why) for key in theirs]

    def refuse(self, why: str, *theirs: str) -> None:
        """Record keys of the other system that can't be imported, for the reason `why`."""
        self.findings += [KeyFinding(KeyOutcome.REFUSED, key, why=why) for key in theirs]

    def outcome_of(self, key: str) -> KeyFinding | None:
        """Return the most severe finding on a key of the other system or on a section that contains the key; None without one."""
        order = list(KeyOutcome)
        found = [f for f in self.findings if f.theirs == key or key.startswith(f"{f.theirs}.")]
        return max(found, key=lambda finding: order.index(finding.outcome), default=None)

    def yaml(self, header: str) -> str:
        """Return the config as readable YAML: values that differ from the defaults, with comments on changes."""
        order = [field.name for field in attrs.fields(RunConfig)]
        kept = _without_defaults(self.values)
        values = {key: kept[key] for key in sorted(kept, key=lambda key: (order.index(key.partition(".")[0]), not key.endswith((".name", "model.path"))))}  # fmt: skip
        comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
        return comment + "\n".join(_lines(_nest(values), self.comments, "")) + "\n"


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        inner = tree
        for part in above:
            below = inner.setdefault(part, {})
            if not isinstance(below, dict):
                below = inner[part] = {"name": below}
            inner = below
        if isinstance(inner.get(last), dict) and not isinstance(value, dict):
            inner[last] = {"name": value, **inner[last]}
        else:
            inner[last] = value
    return tree


_OF_FILES = ("reward.function.", "data.source.")
_SELECTING = (".name", ".path", ".attribute")


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out values that equal the chosen plugins' defaults; if the config is invalid, keep all values."""
    # Plugins in the job's own files are left out, since they are not run and may not exist here.
    own = {key: value for key, value in values.items() if key.startswith(_OF_FILES)}
    known = {key: value for key, value in values.items() if key not in own}
    selecting = {
        key: value
        for key, value in known.items()
        if key.endswith((*_SELECTING, "kl.in_loss.coef")) or isinstance(value, list)
    }
    try:
        plain = config_from_mapping({"model": {"path": ""}}).config
        chosen = config_from_mapping(_nest(selecting)).config
        whole = config_from_mapping(_nest(known)).config
    except DovetailError:
        return dict(values)
    kept = own
    for key, value in known.items():
        default = _at(chosen if key not in selecting else plain, key)
        if default is _ABSENT or default != _at(whole, key):
            kept[key] = value
    # The plugin's name is kept if any other key of its section is kept.
    for key, value in values.items():
        section, _, last = key.rpartition(".")
        if last == "name" and any(other.startswith(f"{section}.") for other in kept):
            kept[key] = value
    return {key: value for key, value in values.items() if key in kept}


_ABSENT = object()


def _at(config: Any, key: str) -> Any:
    """Return the value at a dotted key of a config, or of mappings in the config; `_ABSENT` if there is none."""
    for part in key.split("."):
        is_mapping = isinstance(config, Mapping)
        config = config.get(part, _ABSENT) if is_mapping else getattr(config, part, _ABSENT)
        if config is _ABSENT:
            break
    return config


def _lines(tree: Mapping[str, Any], comments: Mapping[str, str], above: str) -> Iterator[str]:
    indent = "  " * (above.count(".") + 1 if above else 0)
    for name, value in tree.items():
        key = f"{above}.{name}" if above else name
        note = f"  # {comments[key]}" if key in comments else ""
        below = [comment for comment in comments if comment.startswith(f"{key}.")]
        selects_alone = isinstance(value, dict) and list(value) == ["name"] and not below
        written = value["name"] if selects_alone else value
        if isinstance(written, dict) and written and (below or not above or len(_flow(written)) > 70):  # fmt: skip
            yield f"{indent}{_flow(name)}:{note}"
            yield from _lines(written, comments, key)
        else:
            yield f"{indent}{_flow(name)}: {_flow(written)}{note}"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, float) and value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.10g}" if "." in f"{value:.10g}" else f"{value:.1e}".replace("e-0", "e-")
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")
