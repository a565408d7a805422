"""CheckpointStore: checkpoints of a run, each written atomically, and pointers to the latest and the best.

A checkpoint is written to a temporary directory beside its final path, fsynced, given a manifest, and renamed to the final path. A process
killed at any time leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.checkpoint.disk import explained, free_bytes, held, is_full, is_held, readable, sync
from dovetail.checkpoint.manifest import MANIFEST, CheckpointManifest, walk
from dovetail.checkpoint.mark import BEST, BestCheckpoint, Mark
from dovetail.errors import CheckpointError, DiskFullError, DovetailError

LATEST = "latest"
_PREFIX = "step_"
_SAVING, _REPLACED, _REMOVING = ".saving-", ".replaced-", ".removing-"
_POINTER, _BEST_POINTER = ".latest-", ".best-"


class CheckpointStore:
    """The folder of a run's checkpoints: `step_20/`, `step_40/`, …, and the files `latest` and `best`, which name one checkpoint each.

    Reading changes nothing, and works while another process saves. Only the process that holds the run's lock may save, mark, retire and
    recover.
    """

    def __init__(self, directory: Path, keep: int | None = None, every: int = 0) -> None:
        """Open the folder, which the first save creates.

        Args:
            directory: the folder of the checkpoints.
            keep: the number of latest checkpoints to keep, besides the best one; None keeps all.
            every: checkpoints of steps divisible by this number are also kept; 0 for none.

        Raises:
            CheckpointError: `keep` is below 1, or the folder or its file `best` can't be read.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"keep={keep} would keep no checkpoint; use 1 or more, or None for all"
            )
        self.directory = Path(directory)
        self.keep, self.every = keep, every
        self.best()

    def recover(self) -> None:
        """Restore order after a process was killed while it saved.

        Partial checkpoints are removed. A finished checkpoint that was moved away for a new one of the same step, which was then not saved,
        is moved back. `latest` and `best` are corrected.

        Raises:
            CheckpointError: the folder can't be written.
        """
        with explained(f"can't open the checkpoints in {self.directory}"):
            self._recover()

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint and make it the latest; for errors see `saving`.

        Args:
            step: finished training steps.
            write: a function that writes the checkpoint's files into the empty, temporary directory passed to it.

        Returns:
            The checkpoint's directory.
        """
        with self.saving(step) as directory:
            write(directory)
        return self.path(step)

    @contextmanager
    def saving(self, step: int, needed: int = 0, mark: Mark | None = None) -> Iterator[Path]:
        """Yield an empty, temporary directory for a checkpoint's files.

        When the block ends, the checkpoint becomes the latest, and replaces an earlier one of the same step. The block may end
        in another thread than it began, for files that are written while training continues.

        Args:
            step: finished training steps.
            needed: the estimated size in bytes, 0 if unknown; if an earlier checkpoint exists, the latest one's size is used instead.
            mark: metric and value if this is the best checkpoint so far; written together with the files.

        Raises:
            DiskFullError: the disk has too few free bytes, before or during writing; the error gives needed and free bytes.
            CheckpointError: the disk is not writable. Other errors of the block are raised unchanged. After any error, no partial
                checkpoint is left and earlier checkpoints stay.
        """
        final = self.path(step)
        with explained(f"can't save the checkpoint of step {step}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._check_room(step, needed)
        partial = self._temporary(_SAVING, final)
        try:
            partial.mkdir()
            with held(partial):
                yield partial
                self._seal(partial, step, mark)
                self._commit(partial, final)
        except BaseException as error:
            better = self._explain(error, step, partial)
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):
                self._recover()
            if better is not None:
                raise better from error
            raise
        with explained(
            f"the checkpoint of step {step} is saved, but marking the best one or clearing older ones failed"
        ):
            self._mend_best()
            self._retire()

    def latest(self) -> Path | None:
        """Return the path of the checkpoint saved last; None if there is none."""
        saved, pointed = self.saved(), self._pointed()
        # A checkpoint with a damaged manifest stays the latest: the user decides whether to go back to an earlier one.
        # After a kill between the checkpoint's rename and the pointer's, the pointer names an older checkpoint.
        if pointed is not None and (not saved or _sequence(pointed) < 0):
            return pointed
        return saved[-1] if saved else None

    def mark_best(self, step: int, value: float, metric: str = "") -> None:
        """Mark the checkpoint of a step as the best one; retention does not remove the best one.

        Args:
            step: the step of a saved checkpoint.
            value: the metric's value at this step; finite.
            metric: the metric's name.

        Raises:
            CheckpointError: there is no checkpoint of this step, the value is not finite, or the disk can't be written; the earlier mark
                then stays.
        """
        checkpoint = self.path(step)
        if not self.has(step):
            raise CheckpointError(
                f"step {step} can't be marked as the best: {checkpoint} is not a checkpoint",
                hint="save the step's checkpoint before you mark it",
            )
        with explained(f"can't mark the checkpoint of step {step} as the best"):
            self._mark(BestCheckpoint(path=checkpoint, metric=metric, value=value))
            self._retire()

    def best(self) -> BestCheckpoint | None:
        """Return the checkpoint marked as the best; None if none is marked or the marked one is gone.

        Raises:
            CheckpointError: the file `best` is damaged.
        """
        best = BestCheckpoint.read(self.directory)
        return best if best is not None and _complete(best.path) else None

    def saved(self) -> list[Path]:
        """Return the paths of all checkpoints, in the order of saving."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.glob(f"{_PREFIX}*") if _complete(path)]
        return sorted(found, key=_sequence)

    def has(self, step: int) -> bool:
        """Return whether there is a checkpoint of this step."""
        return _complete(self.path(step))

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, whether it exists or not."""
        return self.directory / f"{_PREFIX}{step}"

    def find(self, step: int | None = None) -> Path:
        """Return the checkpoint of a step, or the latest.

        Raises:
            CheckpointError: there is no such checkpoint; the error names the existing ones.
        """
        found = self.latest() if step is None else self.path(step) if self.has(step) else None
        if found is None:
            there = ", ".join(path.name for path in self.saved()) or "none"
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{self.directory} holds {which}; it has: {there}")
        return found

    def retire(self, keep: int) -> list[str]:
        """Remove all checkpoints but the `keep` latest, the best, and those at steps divisible by `self.every`.

        Returns:
            The names of the removed checkpoints.
        """
        before = {path.name for path in self.saved()}
        self.keep = keep
        with explained(f"can't remove older checkpoints in {self.directory}"):
            self._retire()
        return sorted(before - {path.name for path in self.saved()})

    def verify(self, path: Path) -> CheckpointManifest:
        """Check that every file of a checkpoint is as it was written, and return the manifest.

        Raises:
            CheckpointError: the checkpoint is incomplete or damaged; the error names the files and the other checkpoints.
        """
        try:
            manifest = CheckpointManifest.read(path)
        except CheckpointError as error:
            error.hint = error.hint or self._way_back(path)
            raise
        damages = list(manifest.damages(path))
        if damages:
            raise CheckpointError(
                f"checkpoint {path} is damaged: {'; '.join(damages)}", hint=self._way_back(path)
            )
        return manifest

    def _way_back(self, damaged: Path) -> str:
        """Return a hint that names the checkpoint to go back to from a damaged one."""
        others = [path for path in self.saved() if path != damaged and _sequence(path) >= 0]
        if not others:
            return "restore it from a copy: there is no other checkpoint to go back to"
        return f"to go back to {others[-1].name}, remove the damaged checkpoint (rm -r {damaged}) and resume again"

    # -- saving --------------------------------------------------------------------------------

    def _check_room(self, step: int, needed: int) -> None:
        latest = self.latest()
        size = needed if latest is None else _size(latest)
        if free_bytes(self.directory) < size:
            raise self._full(step, 0, expected=needed)

    def _seal(self, partial: Path, step: int, mark: Mark | None) -> None:
        saved = self.saved()
        sequence = _sequence(saved[-1]) + 1 if saved else 0
        manifest = CheckpointManifest.of(partial, step=step, sequence=sequence, mark=mark)
        (partial / MANIFEST).write_text(manifest.to_json())
        for file in walk(partial):
            sync(file)
        for folder in [path for path in partial.rglob("*") if path.is_dir()]:
            sync(folder)
        sync(partial)

    def _commit(self, partial: Path, final: Path) -> None:
        pointer = self._prepare_pointer(final)
        if final.exists():
            # A directory can't be renamed onto another. After a kill between the two renames, `_recover` restores the old one.
            final.rename(self._temporary(_REPLACED, final))
        partial.rename(final)
        sync(self.directory)
        self._point(pointer)
        self._remove_all(_REPLACED)

    def _prepare_pointer(self, checkpoint: Path) -> Path:
        """Write the next `latest` to a temporary file: everything that needs disk space is done before the first rename."""
        pointer = self._temporary(_POINTER, checkpoint)
        pointer.write_text(f"{checkpoint.name}\n")
        sync(pointer)
        return pointer

    def _point(self, pointer: Path) -> None:
        pointer.replace(self.directory / LATEST)
        sync(self.directory)

    def _mark(self, best: BestCheckpoint) -> None:
        pointer = self._temporary(_BEST_POINTER, best.path)
        pointer.write_text(best.to_json())
        sync(pointer)
        pointer.replace(self.directory / BEST)
        sync(self.directory)

    def _retire(self) -> None:
        """Remove the checkpoints beyond `keep`, renamed first so that a half-removed one is never listed."""
        if self.keep is None:
            return
        best = self.best()
        for path in self.saved()[: -self.keep]:
            if not (self.every and _step(path) % self.every == 0) and (
                best is None or path != best.path
            ):
                path.rename(self._temporary(_REMOVING, path))
        self._remove_all(_REMOVING)

    def _explain(self, error: BaseException, step: int, partial: Path) -> CheckpointError | None:
        """Return a CheckpointError for a failure of the disk; None for any other error."""
        if not isinstance(error, Exception):
            return None
        # Checked for every error: an engine's own CheckpointError may hide that the disk is full.
        free = free_bytes(self.directory)
        if is_full(error, free):
            written = _size(partial)
            shutil.rmtree(partial, ignore_errors=True)
            return self._full(step, written)
        if isinstance(error, OSError) and not isinstance(error, DovetailError):
            return CheckpointError(f"can't save the checkpoint of step {step}: {error}")
        return None

    def _full(self, step: int, written: int, *, expected: int = 0) -> DiskFullError:
        """Return the error for a disk with less free space than a checkpoint needs.

        Args:
            step: the step of the checkpoint.
            written: number of bytes of the checkpoint that were written.
            expected: size of the checkpoint in bytes, used if there is no earlier one; 0 if unknown.
        """
        free = free_bytes(self.directory)
        latest, best = self.latest(), self.best()
        if latest is not None:
            kept = f"{latest.name} is intact"
            needed = f"about {readable(max(_size(latest), written))}, going by {latest.name}"
        else:
            kept = "there is no earlier checkpoint"
            needed = (
                f"about {readable(expected)}"
                if expected
                else f"more than the {readable(written)} written before"
            )
        older = [p for p in self.saved()[:-1] if best is None or p != best.path]
        removable = readable(sum(map(_size, older)))
        names = f"; older checkpoints take {removable}: {', '.join(p.name for p in older)}"
        return DiskFullError(
            f"the disk is full: the checkpoint of step {step} needs {needed}, but {readable(free)} are free "
            f"in {self.directory}; no part of it is kept; {kept}",
            hint="free some space, or keep fewer checkpoints (trainer.keep_checkpoints)"
            + (names if older else ""),
        )

    # -- after a kill --------------------------------------------------------------------------

    def _recover(self) -> None:
        if not self.directory.is_dir():
            return
        for replaced in self.directory.glob(f"{_REPLACED}*"):
            final = self.directory / _named(replaced, _REPLACED)
            if not final.exists():
                replaced.rename(final)
        for prefix in (_SAVING, _REPLACED, _REMOVING, _POINTER, _BEST_POINTER):
            self._remove_all(prefix)
        latest = self.latest()
        if latest is not None and latest != self._pointed():
            self._point(self._prepare_pointer(latest))
        self._mend_best()

    def _mend_best(self) -> None:
        """Mark the newest checkpoint whose manifest says that it was the best, unless a newer one is marked."""
        for path in reversed(self.saved()):
            with suppress(CheckpointError):
                manifest, best = CheckpointManifest.read(path), self.best()
                before = -1 if best is None else _sequence(best.path)
                if manifest.mark is not None and manifest.sequence > before:
                    self._mark(
                        BestCheckpoint(
                            path=path, metric=manifest.mark.metric, value=manifest.mark.value
                        )
                    )
                    return

    def _pointed(self) -> Path | None:
        """Return the checkpoint that the file `latest` names, damaged or not."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            name = (self.directory / LATEST).read_text().strip()
            path = self.directory / name
            if name.startswith(_PREFIX) and path.is_dir():
                return path
        return None

    def _remove_all(self, prefix: str) -> None:
        for path in self.directory.glob(f"{prefix}*"):
            if path.is_file():
                path.unlink(missing_ok=True)
            elif not is_held(path):
                shutil.rmtree(path)

    def _temporary(self, prefix: str, checkpoint: Path) -> Path:
        return self.directory / f"{prefix}{checkpoint.name}-{secrets.token_hex(4)}"


def _size(checkpoint: Path) -> int:
    """Return the total size of a checkpoint's files in bytes."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def _complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _sequence(path: Path) -> int:
    """Return a checkpoint's sequence number; −1 if the manifest is damaged, so that it is not the latest."""
    try:
        return CheckpointManifest.read(path).sequence
    except CheckpointError:
        return -1


def _named(path: Path, prefix: str) -> str:
    return path.name.removeprefix(prefix).rpartition("-")[0]
