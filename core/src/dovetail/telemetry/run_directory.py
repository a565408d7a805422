"""RunDirectory: the folder that one run claims, and the files in it."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

import attrs

from dovetail.errors import ConfigError, RunDirectoryError
from dovetail.file_locks import lock, system_locks
from dovetail.sections import RunConfig
from dovetail.telemetry.jsonl import (
    append_rows,
    dump_json,
    dump_rows,
    keep_rows,
    read_rows,
    step_of,
)
from dovetail.text import encodable

if TYPE_CHECKING:  # these import NumPy
    from dovetail.interfaces.plugin import Logger
    from dovetail.interfaces.source_data import BadRow

MARKER = "run.json"
"""The file whose exclusive creation claims a directory."""
SHOWN_BAD_ROWS = 10
"""Maximum number of left-out rows that the console shows."""


class RunDirectory:
    """The directory `runs/<project>/<experiment>/` of one run, usable as a path.

    Attributes:
        path: the directory.
        config: the path of the resolved config.
        final: the path of the trained model, in Hugging Face format.
        metrics: the path of the metrics file, with one JSON object for each log call.
        events: the path of the structured log.
        restarts: the path of the record of the supervisor's restarts, one JSON object each: `time`, `cause`, `exit_code`, `step` (the last
            step before the restart), `from_step` (the step of the checkpoint), and `repeated` (the number of steps to repeat).
        checkpoints: the folder of checkpoints.
        summary: the path of the run's summary.
        report: the path of the report page.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.summary = path / "config.yaml", path / "summary.json"
        self.metrics, self.events = path / "metrics.jsonl", path / "events.jsonl"
        self.restarts, self.report = path / "restarts.jsonl", path / "report.html"
        self.checkpoints, self.final = path / "checkpoints", path / "final"

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Claim a directory for a new run; if several processes try at once, only one succeeds.

        Raises:
            RunDirectoryError: the directory holds another run or other files, or can't be created.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(entry.name for entry in path.iterdir() if entry.name != MARKER)
            if foreign and not (path / MARKER).exists():
                raise _holds_foreign_files(path, foreign)
            with (path / MARKER).open("x", encoding="utf-8") as file:
                json.dump(_claim(), file)
        except FileExistsError as error:
            if isinstance(error, RunDirectoryError):
                raise
            raise already_taken(path) from None
        except OSError as error:
            raise _not_made(path, error.strerror or str(error)) from error
        (path / "samples").mkdir(exist_ok=True)
        (path / "checkpoints").mkdir(exist_ok=True)
        return cls(path)

    @classmethod
    def check_writable(cls, path: str | os.PathLike[str]) -> None:
        """Check that a run directory can be created at a path; nothing is left behind.

        Raises:
            RunDirectoryError: the nearest existing parent of the path is a file, or can't be written to.
        """
        path = Path(path)
        absolute = path.absolute()
        above = next(p for p in (absolute, *absolute.parents) if os.path.exists(p))  # noqa: PTH110 - Path.exists may raise
        if not above.is_dir():
            raise _not_made(path, f"{above} is a file")
        try:
            # Only an attempt shows it: root may write to /proc, but can't create a folder there.
            with TemporaryDirectory(prefix=".dovetail-", dir=above):
                pass
        except OSError as error:
            raise _not_made(path, f"{above} can't be written to: {error.strerror}") from error

    @classmethod
    def check_free(cls, path: str | os.PathLike[str]) -> None:
        """Check that no run has claimed a directory, and that this system has file locks.

        Raises:
            RunDirectoryError: the directory holds another run.
            DovetailError: this system has no file locks.
        """
        system_locks()
        if (Path(path) / MARKER).exists():
            raise already_taken(Path(path))

    @staticmethod
    def path_for(config: RunConfig) -> Path:
        """Return the run directory of a config, two levels below `output_dir`.

        Raises:
            ConfigError: project, experiment or a part of output_dir can't be the name of a folder.
        """
        for key in ("project", "experiment"):
            name = getattr(config, key)
            size = len(name.encode(errors="surrogatepass"))
            if name in (".", "..") or "/" in name or not name.isprintable() or not 1 <= size <= 255:
                raise ConfigError(
                    f"{key} is {name!r}; expected the name of one folder: 1 to 255 bytes of printable characters without "
                    "'/', and neither '.' nor '..'",
                    hint=f"set {key}=NAME; to choose the folder above project and experiment, set output_dir=PATH",
                )
        longest = max(
            Path(config.output_dir).parts or [""], key=lambda part: len(os.fsencode(part))
        )
        if (size := len(os.fsencode(longest))) > 255:
            raise ConfigError(
                f"output_dir contains a folder name of {size} bytes, {longest[:20]!r}…; expected at most 255",
                hint="shorten this name in output_dir",
            )
        return Path(config.output_dir) / config.project / config.experiment

    @classmethod
    def begun(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether a run has begun in this directory."""
        return (Path(path) / MARKER).is_file()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Return the directory of an existing run, to resume or read it.

        Raises:
            RunDirectoryError: there is no such directory, or it is not a run directory.
        """
        path = Path(path)
        if not path.is_dir():
            raise RunDirectoryError(
                f"there is no run directory {str(path)!r}", hint=_runs_nearby(path)
            )
        if not (path / MARKER).is_file():
            holds = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
            raise RunDirectoryError(
                f"{str(path)!r} is not a run directory: it has no {MARKER} (it holds {holds})",
                hint=f"if it belongs to a run, create an empty file {MARKER} in it"
                if any(path.glob("checkpoints/step_*"))
                else _runs_nearby(path),
            )
        return cls(path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the directory's lock within the block; the system releases the lock if this process dies.

        Raises:
            RunDirectoryError: another living process holds the lock, or the directory can't be written to.
        """
        try:
            opened = (self.path / MARKER).open("r+", encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(
                f"can't write to the run directory {str(self.path)!r}: {error.strerror}",
                hint="make it writable, and repeat the command; the run is unchanged",
            ) from error
        with opened as marker:
            if lock(marker.fileno()) is False:
                raise _running(self.path)
            claim = _claim()
            earlier = _read_claim(self.path)
            if any(earlier.get(key) != claim[key] for key in ("host", "process")):
                marker.seek(0)
                marker.truncate()
                json.dump(claim | {"started": earlier.get("started", claim["started"])}, marker)
                marker.flush()
            yield

    @property
    def under_way(self) -> bool:
        """Whether a living process holds the directory's lock."""
        with suppress(OSError), (self.path / MARKER).open(encoding="utf-8") as marker:
            return lock(marker.fileno()) is False
        return False

    @property
    def state(self) -> str:
        """`running`, or how the run ended: `completed`, `stopped`, `failed` or `killed`."""
        status = "running"
        with suppress(RunDirectoryError, LookupError, TypeError):
            status = str(self.read_json("summary.json")["status"])
        # A run whose summary says `running`, but whose directory no process holds, was killed.
        return "running" if self.under_way else "killed" if status == "running" else status

    @property
    def name(self) -> str:
        """The name of the run: `project/experiment`."""
        return "/".join(self.path.parts[-2:])

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file below the directory atomically; text that UTF-8 can't encode is converted as by `encodable`.

        Raises:
            RunDirectoryError: the file can't be written, as on a full disk.
        """
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(encodable(text))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            raise RunDirectoryError(
                f"the file {target} can't be written: {error.strerror or error}",
                hint="check that the disk has free space, and that the folder is writable",
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def write_json(self, name: str, value: Any) -> Path:
        """Write JSON atomically; NaN and infinity become null."""
        return self.write_text(name, dump_json(value, indent=2) + "\n")

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file below the directory.

        Raises:
            RunDirectoryError: the file does not exist, or is not JSON.
        """
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RunDirectoryError(
                f"can't read {str(self.path / name)!r}: {error}",
                hint="restore the file from a copy, or start a new run with experiment=NAME",
            ) from error

    def write_samples(
        self, step: int, rows: Iterable[Mapping[str, Any]], name: str = "step"
    ) -> Path:
        """Write samples of a step to `samples/<name>_<step>.jsonl`, replacing an existing file."""
        return self.write_text(f"samples/{name}_{step}.jsonl", dump_rows(rows))

    def name_bad_rows(self, rows: Iterable[BadRow], logger: Logger) -> None:
        """Append left-out rows to `bad_rows.jsonl`, each row once, and log the first ten."""
        path = self.path / "bad_rows.jsonl"
        known = {row["where"] for row in read_rows(path)}
        for row in rows:
            if row.where in known:
                continue
            known.add(row.where)
            append_rows(path, [attrs.asdict(row)])
            if len(known) <= SHOWN_BAD_ROWS:
                logger.warning(f"a bad row is left out: {row.message}", hint=row.hint)
            if len(known) == SHOWN_BAD_ROWS:
                logger.warning(f"further bad rows are listed only in {path}")

    def rewind(self, step: int) -> None:
        """Remove the metrics, samples and fault reports of steps after `step`, the step from which the run resumes.

        Partial files of a killed process are removed too.
        """
        for unfinished in (*self.path.glob(".*.tmp"), *self.path.glob("samples/.*.tmp")):
            unfinished.unlink()
        keep_rows(self.metrics, lambda row: step_of(row) <= step)
        for file in (*self.path.glob("samples/*_*.jsonl"), *self.path.glob("faults/step_*.json")):
            number = file.stem.rpartition("_")[2]
            if number.isdecimal() and int(number) > step:
                file.unlink()


def _claim() -> dict[str, Any]:
    """Return the content of `run.json` for this process: host, process id and time of the claim."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": 1, "started": started, "host": socket.gethostname(), "process": os.getpid()}


def _read_claim(path: Path) -> dict[str, Any]:
    """Return the content of a directory's marker; empty if the marker is incomplete."""
    rows = read_rows(path / MARKER)
    return rows[0] if rows else {}


def _running(path: Path) -> RunDirectoryError:
    claim = _read_claim(path)
    return RunDirectoryError(
        f"a run is under way in {str(path)!r}: process {claim.get('process', 'unknown')} on host "
        f"{claim.get('host', 'unknown')}",
        hint="wait until it has ended, or stop it with Ctrl-C or SIGTERM: it saves first; or start another run with experiment=NAME",
    )


def already_taken(path: Path) -> RunDirectoryError:
    """Return the error for a path where no run can begin: it is a file, or the directory of a run that is running or has ended."""
    if not path.is_dir():
        return RunDirectoryError(
            f"the run directory {str(path)!r} can't be created: a file has this path",
            hint="choose another name with experiment=NAME, or another output_dir=PATH",
        )
    if RunDirectory(path).under_way:
        return _running(path)
    saved = any((path / "checkpoints").glob("step_*"))
    fix = f"continue it with `dovetail resume {path}`" if saved else f"remove it (rm -r {path})"
    return RunDirectoryError(
        f"{str(path)!r} already holds a run: {_describe(path)}",
        hint=f"{fix}, or start another run with experiment=NAME",
    )


def _describe(path: Path) -> str:
    """Return a text on the run in a directory: when it started, its logged steps and its last checkpoint."""
    claim = _read_claim(path)
    started = f"started {claim['started']}" if "started" in claim else "started"
    found = (step_of(row) for row in read_rows(path / "metrics.jsonl"))
    steps = max((int(step) for step in found if math.isfinite(step)), default=0)
    logged = f"{steps} step{'' if steps == 1 else 's'} logged"
    folder = path / "checkpoints"
    saved = sorted(folder.glob("step_*"), key=lambda entry: entry.stat().st_mtime)
    checkpoint = f"last checkpoint {saved[-1].name}" if saved else "no checkpoint"
    return f"{started}, {logged}, {checkpoint}"


def _not_made(path: Path, why: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"can't create the run directory {str(path)!r}: {why}",
        hint="set output_dir=PATH to a folder that you can write to",
    )


def _holds_foreign_files(path: Path, names: list[str]) -> RunDirectoryError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return RunDirectoryError(
        f"{str(path)!r} holds files that don't belong to a run: {', '.join(names[:4])}{more}",
        hint="choose an empty folder with experiment=NAME or output_dir=PATH",
    )


def _runs_nearby(path: Path) -> str:
    """Return a hint that names the run directories below a path or beside it."""
    for folder in (path, path.parent):
        if folder.is_dir():
            runs = sorted(marker.parent for marker in folder.glob(f"*/{MARKER}"))
            if runs:
                return f"run directories near this path: {', '.join(str(run) for run in runs[:5])}"
    return "pass the folder that a run printed at its start: runs/<project>/<experiment>"
