"""Rules about what a run reads and writes: files and trackers named twice, models that are not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.sections import RunConfig

if TYPE_CHECKING:
    from dovetail.planning.plan import Plan


class FileTwice(PreflightRule):
    """A file that is read twice: its rows count double, or what is held out is trained on.

    Held-out figures say nothing of what a model can do where it was trained on the same rows.
    """

    name = "file_twice"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        train, val = config.data.train_files, config.data.val_files
        for key, files in (("train_files", train), ("val_files", val)):
            for file in _repeated(files):
                yield self.warning(
                    f"data.{key} names {file} more than once: its prompts count as often",
                    hint=f"name it once in data.{key}=",
                )
        places = {_place(file) for file in train}
        for file in dict.fromkeys(file for file in val if _place(file) in places):
            yield self.warning(
                f"data.val_files and data.train_files both name {file}: validation asks what is trained on",
                hint="set data.val_files= to prompts that are held out",
            )


class TrackerTwice(PreflightRule):
    """One tracker that is asked for twice with the same settings: it would show or write everything twice."""

    name = "tracker_twice"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        trackers = list(config.tracking)
        for number, tracker in enumerate(trackers):
            if tracker in trackers[:number]:
                yield self.error(
                    f"tracking[{number}] is {tracker.name or tracker.path} once more, with the same settings: everything would "
                    "be told twice",
                    hint=f"leave tracking[{number}] out of tracking=",
                )


class ModelMissing(PreflightRule):
    """A critic or a reference with a path of its own, and no model there that can be read.

    In runs on several machines it may be on the others, hence a warning there.
    """

    name = "model_missing"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.errors import ModelError
        from dovetail.planning.model_shape import read_shape

        for role in plan.models if plan is not None else ():
            if role.path == config.model.path:
                continue
            try:
                read_shape(config.model, role.path)
            except ModelError as error:
                find = self.error if config.runtime.in_process else self.warning
                cause = error.__cause__
                reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
                yield find(
                    f"{role.role}.path = {role.path} holds no model that transformers can read: {reason}",
                    hint=f"set {role.role}.path= to a directory with config.json, or a hub id, or leave it out to take model.path",
                )


def _repeated(files: tuple[str, ...]) -> list[str]:
    """Those that are named again, each once, as they are first written."""
    counts = Counter(_place(file) for file in files)
    first = {_place(file): file for file in reversed(files)}
    return [first[place] for place, count in counts.items() if count > 1]


def _place(file: str) -> Path | str:
    """The file itself, however it is written; an address stays as it is."""
    return file if "://" in file else Path(file).expanduser().resolve()
