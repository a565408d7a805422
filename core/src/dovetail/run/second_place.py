"""SecondPlace: copies of a run's checkpoints at another address, such as a bucket, made in the background."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from pathlib import Path

from dovetail.checkpoint.manifest import MANIFEST, CheckpointManifest, walk
from dovetail.checkpoint.store import CheckpointStore
from dovetail.errors import CheckpointError, ConfigError
from dovetail.hooks import hookimpl
from dovetail.interfaces.plugin import Logger

_BESIDE = ("config.yaml", "plugins.lock.json", "metrics.jsonl")
"""Files of the run directory that are needed, besides a checkpoint, to continue a run."""
_END_SECONDS = 1800.0
"""Seconds that the end of a run waits for the copy of its last checkpoint."""


class SecondPlace:
    """The folder URL/PROJECT/EXPERIMENT with copies of a run's checkpoints, on any file system that fsspec knows.

    Credentials come from the environment.
    """

    def __init__(self, url: str, run: str) -> None:
        """Set the address; nothing is created or read yet.

        Args:
            url: the address below which the folder `run` is, such as `s3://bucket/runs`, `gs://…`, or a local folder.
            run: the name of the run, `project/experiment`.

        Raises:
            ConfigError: fsspec or the file system's package is not installed, or fsspec knows no such file system.
        """
        self.url = f"{url.rstrip('/')}/{run}"
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"trainer.copy_to = {url} can't be used: {error}",
                hint="install fsspec and the file system's package (s3fs, gcsfs, adlfs, …), or set trainer.copy_to to a folder",
            ) from error

    def update(self, store: CheckpointStore, run: Path) -> None:
        """Copy checkpoints of `store` that this folder lacks, newest first; remove copies of checkpoints that `store` no longer has.

        The other files of the run directory `run` that a continued run needs are copied too.
        """
        there, kept = self._complete(), store.saved()
        for checkpoint in reversed(kept):
            if checkpoint.name not in there:
                self._put(checkpoint, run)
        for name in there - {path.name for path in kept}:
            # The manifest is removed first: without it, a partly removed copy does not count as a checkpoint.
            self._files.rm_file(f"{self._root}/{name}/{MANIFEST}")
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def newest(self) -> str | None:
        """Return the name of the latest copied checkpoint; None if there is none."""
        numbered = [(self._sequence(name), name) for name in self._complete()]
        return max(numbered)[1] if numbered else None

    def read_config(self) -> str:
        """Return the text of the copied `config.yaml`."""
        return str(self._files.cat_file(f"{self._root}/config.yaml").decode())

    def fetch(self, name: str, run: Path) -> None:
        """Copy a checkpoint, and the files that a run needs to continue, into a run directory.

        Raises:
            CheckpointError: the copy differs from the saved checkpoint; the run directory is unchanged.
        """
        checkpoints = run / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        partial = checkpoints / f".saving-{name}-{secrets.token_hex(4)}"
        try:
            for file in self._files.find(f"{self._root}/{name}"):
                target = partial / str(file)[len(f"{self._root}/{name}/") :]
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(file, str(target))
            if damages := list(CheckpointManifest.read(partial).damages(partial)):
                raise CheckpointError(
                    f"the copy {self.url}/{name} is damaged: {'; '.join(damages)}",
                    hint=f"remove the damaged copy; the next start then takes an earlier one from {self.url}",
                )
            for file in _BESIDE:
                if self._files.exists(f"{self._root}/{file}") and not (run / file).exists():
                    self._files.get_file(f"{self._root}/{file}", str(run / file))
            partial.rename(checkpoints / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _put(self, checkpoint: Path, run: Path) -> None:
        target = f"{self._root}/{checkpoint.name}"
        manifest = checkpoint / MANIFEST
        files = {
            file: f"{target}/{file.relative_to(checkpoint).as_posix()}" for file in walk(checkpoint)
        }
        files |= {run / name: f"{self._root}/{name}" for name in _BESIDE if (run / name).exists()}
        # The manifest is copied last: its presence marks a complete copy.
        for file in sorted(files, key=lambda file: file == manifest):
            self._files.makedirs(files[file].rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), files[file])

    def _complete(self) -> set[str]:
        self._files.invalidate_cache()
        return {
            str(path).split("/")[-2] for path in self._files.glob(f"{self._root}/step_*/{MANIFEST}")
        }

    def _sequence(self, name: str) -> int:
        try:
            text = self._files.cat_file(f"{self._root}/{name}/{MANIFEST}")
            return int(json.loads(text)["sequence"])
        except (ValueError, KeyError, TypeError):
            return -1


class CheckpointCopies:
    """Observer that copies a run's checkpoints to another file system (`SecondPlace`), in a separate thread.

    Args:
        place: the folder of the copies.
        store: the run's own checkpoints.
        logger: a logger with the standard methods.
    """

    def __init__(self, place: SecondPlace, store: CheckpointStore, logger: Logger) -> None:
        self._place, self._store, self._logger = place, store, logger
        self._wanted, self._ending = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="dovetail-copies", daemon=True)

    @hookimpl
    def run_started(self) -> None:
        """Start the thread, which first copies checkpoints that an earlier process did not copy."""
        self._wanted.set()
        self._thread.start()

    @hookimpl
    def checkpoint_saved(self) -> None:
        """Request a copy of the new checkpoint; the copy begins once a running copy has ended."""
        self._wanted.set()

    @hookimpl
    def run_finished(self) -> None:
        """Wait for the last checkpoint to be copied, for a limited time."""
        self._ending = True
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._logger.warning("the last checkpoint was not copied", place=self._place.url)

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()  # before `_ending` is read: a later request sets it again
            ending = self._ending
            self._try()
            if ending:
                return

    def _try(self) -> None:
        for number in (1, 2):
            try:
                self._place.update(self._store, self._store.directory.parent)
            except Exception as error:  # noqa: BLE001 - whatever a file system raises, training goes on
                # Retention may have removed a checkpoint during its copy; the second try lists the kept checkpoints again.
                if number == 2:
                    self._logger.warning(
                        "checkpoints could not be copied; the run tries again after the next save",
                        place=self._place.url,
                        error=f"{type(error).__name__}: {error}",
                    )
            else:
                return
