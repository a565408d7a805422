"""The differences between two plugin locks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

What = Literal[
    "choice", "distribution", "interface", "version", "content", "python", "package", "environment"
]


_ENGINE = "other kernels sample the responses from now on; logprob_check/ and weight_check/ show how far the engine differs from the trainer"
_MEANS = {
    "sglang": _ENGINE,
    "tensorrt-llm": _ENGINE,
    "torch": "kernels may round differently, so the run does not continue bit for bit; weights and optimizer moments are the saved ones",
    "transformers": "the model's code may compute differently; compare the metrics val/ and weight_check/ before and after",
    "vllm": _ENGINE,
}
"""Package → the effect of another version on a run that is continued."""


@dataclass(frozen=True)
class LockDifference:
    """A difference between two plugin locks."""

    subject: str
    """`kind/name` of a plugin, `environment ROLE`, the name of a package, or `python`; the latter two with ` in the environment of ROLE`
    appended if they concern a role's own environment."""
    what: What
    was: str | None
    now: str | None
    """Value in the new lock, as `was` is the value in the old lock; None if that lock lacks the subject."""
    text: str
    """Description of the difference."""
    refused: bool = False
    """Whether a run can't continue with this difference, since the installed plugin may read the saved state differently."""

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return dict(vars(self))


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], gone: Mapping[str, str] | None = None
) -> list[LockDifference]:
    """Return the differences between two plugin locks: errors (`refused` is True) and warnings.

    A different version, content, environment or choice of plugins is a warning. A different distribution of the same name, or a
    different range of interface versions, is an error.

    Args:
        old: the earlier lock.
        new: the current lock.
        gone: the reasons why plugins of the old lock no longer exist, by `kind/name`; each is an error.
    """
    missing = gone or {}
    before, after = _by_key(old), _by_key(new)
    found: list[LockDifference] = []
    for key in sorted(before.keys() | after.keys()):
        title = "/".join(key)
        if key not in after:
            text = f"{title} was used before and is not used now"
            if title in missing:
                text = (
                    f"{title} of {_source(before[key])} can't be found any more: {missing[title]}"
                )
            found.append(
                LockDifference(title, "choice", _source(before[key]), None, text, title in missing)
            )
        elif key not in before:
            text = f"{title} is used now and was not before"
            found.append(LockDifference(title, "choice", None, _source(after[key]), text))
        else:
            found += _of_plugin(title, before[key], after[key])
    found += _of_place("", old, new)
    places, theirs = old.get("environments", {}), new.get("environments", {})
    for role in sorted(places.keys() | theirs.keys()):
        found += _of_environment(role, places.get(role), theirs.get(role))
    return found


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences between two locks as text: the warnings, and the errors."""
    found = differences(old, new)
    return [d.text for d in found if not d.refused], [d.text for d in found if d.refused]


def _of_plugin(
    title: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[LockDifference]:
    if _source(was) != _source(now):
        text = f"{title} came from {_source(was)} and comes from {_source(now)} now"
        yield LockDifference(title, "distribution", _source(was), _source(now), text, refused=True)
        return
    if was.get("api") != now.get("api"):
        text = f"{title} was made for interface {was.get('api')} and is for {now.get('api')} now"
        yield LockDifference(title, "interface", was.get("api"), now.get("api"), text, refused=True)
        return
    if was.get("version") != now.get("version"):
        text = f"{title} was version {was.get('version')} and is {now.get('version')} now"
        yield LockDifference(title, "version", was.get("version"), now.get("version"), text)
    if was.get("sha256") != now.get("sha256"):
        text = f"the code of {title} ({_source(now)}) has changed (SHA-256 {_short(was)} before, {_short(now)} now)"
        yield LockDifference(title, "content", was.get("sha256"), now.get("sha256"), text)


def _of_environment(
    role: str, was: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> Iterator[LockDifference]:
    subject = f"environment {role}"
    paths = [None if place is None else place["path"] for place in (was, now)]
    if paths[0] != paths[1]:
        told = [path or "the run's own environment" for path in paths]
        text = f"{role} ran in {told[0]} and runs in {told[1]} now"
        yield LockDifference(subject, "environment", paths[0], paths[1], text)
    if was and now and "python" in was and "python" not in now:
        text = f"{role} ran in {was['path']}, which is not on this machine or does not answer"
        yield LockDifference(subject, "environment", was["path"], None, text)
    elif was and now:
        yield from _of_place(f" in the environment of {role}", was, now)


def _of_place(
    where: str, was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[LockDifference]:
    """Yield the differences in the Python version and packages of one environment.

    Python or packages are not compared if an entry lacks them, as in locks of earlier versions of core. `where` is empty for the run's own
    environment, else ` in the environment of ROLE`.
    """
    if was.get("python") and now.get("python") and was["python"] != now["python"]:
        text = f"Python{where} was {was['python']} and is {now['python']} now"
        yield LockDifference(f"python{where}", "python", was["python"], now["python"], text)
    if "packages" not in was or "packages" not in now:
        return
    before, after = was["packages"], now["packages"]
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            had, has = before.get(name) or "absent", after.get(name) or "absent"
            means = f": {_MEANS[name]}" if name in _MEANS else ""
            text = f"the package {name}{where} was {had} and is {has} now{means}"
            yield LockDifference(
                f"{name}{where}", "package", before.get(name), after.get(name), text
            )


def _by_key(lock: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(item["kind"], item["name"]): item for item in lock.get("plugins", [])}


def _source(item: Mapping[str, Any]) -> str:
    return str(item.get("distribution") or f"the file {item.get('path')}")


def _short(item: Mapping[str, Any]) -> str:
    return str(item.get("sha256") or "none")[:12]
