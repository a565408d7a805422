"""BackgroundTracker: base class of trackers whose library runs in a separate thread, behind a bounded queue."""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import attrs

from dovetail.config import read_file
from dovetail.errors import DovetailError, PluginNeedsError
from dovetail.interfaces import PluginContext, Tracker
from dovetail_trackers.config import TrackerConfig

TRIES = 3
"""Number of attempts of a log call before the call counts as lost. Opening the run in the library is retried until the training run ends.
"""
FILES = ("config.yaml", "plugins.lock.json", "plan.json")
"""Files of the run directory that are logged as artefacts."""


class TrackerError(DovetailError, RuntimeError):
    """A tracker can't log; training continues."""


@attrs.frozen(kw_only=True)
class TrackedRun:
    """The arguments with which a tracking library opens its run."""

    project: str
    """Name of the project, or of MLflow's experiment."""
    name: str
    """Name of the run in the library."""
    directory: Path
    """The run directory."""
    start_step: int
    """Number of steps finished before this start; the next step is the first to be logged."""
    run_id: str | None
    """The id from an earlier `open_run`, if the run is resumed; None for a run that is new in the library."""
    config: Mapping[str, Any]
    """The resolved config as in `config.yaml`, without values from environment variables."""
    files: tuple[Path, ...]
    """Files of the run to store in the library: the config, the plugin lock file and the plan."""


class BackgroundTracker(Tracker):
    """Base of this package's trackers. A subclass writes to a library, in the tracker's own thread.

    The methods that the run calls, such as after a step, append log calls to a queue and return. A failing call is reported once and
    retried. If the queue is full, further calls are dropped. `close` waits for the queued calls, until `close_seconds` after the run's end.

    `trackers/NAME.json` in the run directory stores the id of the run in the library and the last logged step of each metric. A resumed run
    uses the file to skip values that were logged before.
    """

    api = ">=1.0,<2"
    Config = TrackerConfig
    module: ClassVar[str]
    """The library's module, which the tracker requires."""
    rewinds: ClassVar[bool] = False
    """Whether a resumed run may log a step again, because the library drops one of the two values."""
    settle_seconds: ClassVar[float] = 0.0
    """Seconds for which the library keeps calls in memory. A killed process loses these calls, and a resumed run logs them again."""

    def __init__(self, config: TrackerConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if not self.installed():
            raise PluginNeedsError(
                f"tracker {self.name!r} needs the module {self.module!r}, which is not installed",
                hint=f"pip install 'dovetail-trackers[{self.name}]'",
            )
        self._run: TrackedRun | None = None
        self._thread: threading.Thread | None = None
        self._entries: deque[Callable[[], None]] = deque()
        self._ready = threading.Condition()
        self._ending = threading.Event()
        self._deadline = 0.0
        self._status = "stopped"
        self._busy_since = math.inf
        self._dropped = self._lost = 0
        self._reported: set[str] = set()
        self._logged_before: dict[str, int] = {}
        self._logged: dict[str, int] = {}
        self._settling: deque[tuple[float, dict[str, int]]] = deque()

    @classmethod
    def installed(cls) -> bool:
        """Return whether the library is installed."""
        with suppress(ModuleNotFoundError):  # a parent package of the module is missing
            return importlib.util.find_spec(cls.module) is not None
        return False

    # ── implemented for each library, run in the tracker's thread ──

    @abstractmethod
    def open_run(self, run: TrackedRun) -> str:
        """Open a run in the library, or continue the run `run.run_id`; return the run's id."""

    def logged_steps(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Return each metric's last step that the library has stored for a resumed run; None to use the steps in `trackers/NAME.json`."""
        return None

    @abstractmethod
    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, which are finite numbers."""

    @abstractmethod
    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log samples as a table, each row with prompt, response and score."""

    @abstractmethod
    def end_run(self, status: str) -> None:
        """Write buffered calls and close the run with a status: `completed`, `stopped` or `failed`."""

    # ── hooks, called in the training thread ──

    def run_started(
        self, config: Any, plan: Any, directory: Path, start_step: int, total_steps: int
    ) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work,
                args=(directory, start_step),
                name=f"dovetail-tracker-{self.name}",
                daemon=True,
            )
            self._thread.start()

    def metrics_logged(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = {}
        for name, value in metrics.items():
            number = _number(value)
            if number is None:
                self._report(
                    "type",
                    f"metric {name} at step {step} is left out: it is of type {type(value).__name__}; expected a number",
                )
            elif not math.isfinite(number):
                self._report(
                    "finite",
                    f"metric {name} at step {step} is left out: it is {number}; expected a finite number",
                )
            else:
                kept[name] = number
        if kept:
            self._put(lambda: self._write_metrics(step, kept))

    def samples_logged(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.config.samples and rows:
            self._put(lambda: self.write_samples(step, rows))

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        self._status = str(summary.get("status", "stopped"))
        self._end()

    def close(self) -> None:
        self._end()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        # Limit the wait, since a thread that hangs in the library can't be ended.
        thread.join(max(0.0, self._deadline - monotonic()))
        waiting = len(self._entries) + (thread.is_alive() and self._busy_since < math.inf)
        if waiting or self._dropped or self._lost:
            self.context.logger.warning(
                f"tracker {self.name}: {waiting + self._dropped + self._lost} log calls were not written: "
                f"{self._dropped} dropped because the queue was full (queue_size={self.config.queue_size}), {self._lost} failed, "
                f"{waiting} still waiting at the end (close_seconds={self.config.close_seconds:g})"
            )

    def _end(self) -> None:
        if not self._ending.is_set():
            self._deadline = monotonic() + self.config.close_seconds
            with self._ready:
                self._ending.set()
                self._ready.notify_all()

    def _put(self, entry: Callable[[], None]) -> None:
        if self._thread is None:
            return
        with self._ready:
            full = len(self._entries) >= self.config.queue_size
            if not full:
                self._entries.append(entry)
                self._ready.notify_all()
        self._dropped += full
        if monotonic() - self._busy_since > self.config.retry_seconds or full:
            self._report(
                "failed", f"{len(self._entries)} log calls are waiting; training continues"
            )

    def _report(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Log a warning, once for each kind of problem."""
        if kind not in self._reported:
            self._reported.add(kind)
            self.context.logger.warning(f"tracker {self.name}: {text}", exc_info=error)

    # ── run in the tracker's thread ──

    def _work(self, directory: Path, start_step: int) -> None:
        if not self._try("the run could not be opened", lambda: self._open(directory, start_step)):
            return
        while (entry := self._next()) is not None:
            self._lost += not self._try("a log call failed", entry, TRIES)
        if self._try("the run could not be closed", lambda: self.end_run(self._status), 1):
            self._keep_state(math.inf)

    def _next(self) -> Callable[[], None] | None:
        while True:
            with self._ready:
                seconds = self.settle_seconds if self._settling else None
                if self._ready.wait_for(lambda: self._entries or self._ending.is_set(), seconds):
                    return self._entries.popleft() if self._entries else None
            self._keep_state(monotonic() - self.settle_seconds)

    def _try(self, what: str, call: Callable[[], None], tries: float = math.inf) -> bool:
        """Make a call, with retries, and return whether it succeeded; `what` names the call in warnings.

        After the run's end, there is only one more try, without waiting.
        """
        tried = 0
        while tried < tries:
            last = self._ending.is_set()
            self._busy_since = monotonic()
            try:
                call()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything
                self._report("failed", f"{what}: {_described(error)}; training continues", error)
            else:
                return True
            finally:
                self._busy_since = math.inf
            if last:
                break
            tried += 1
            if tried < tries:
                self._ending.wait(self.config.retry_seconds)
        return False

    def _open(self, directory: Path, start_step: int) -> None:
        place = directory / "trackers" / f"{self.name}.json"
        project = self.config.project or directory.parent.name
        state = self._read_state(place)
        run_id = state.get("run_id")
        if state and state.get("project") != project:
            self._report(
                "project",
                f"the saved run id {run_id} belongs to project {state.get('project')!r}, not to {project!r}: the tracker starts a new run in {project!r}",
            )
            state, run_id = {}, None
        config = directory / "config.yaml"
        settings = read_file(config).tree if config.exists() else {}
        self._run = TrackedRun(
            project=project,
            name=self.config.run_name or directory.name,
            directory=directory,
            start_step=start_step,
            run_id=run_id,
            config={key: value for key, value in settings.items() if key != "given"},
            files=tuple(directory / name for name in FILES if (directory / name).exists()),
        )
        opened = self.open_run(self._run)
        if run_id not in (None, opened):
            state = {}
            self._report(
                "project",
                f"run id {run_id} is not in project {project!r}: the tracker starts the new run {opened}",
            )
        self._run = attrs.evolve(self._run, run_id=opened)
        if state and not self.rewinds:
            stored = self.logged_steps(self._run)
            self._logged_before = dict(state["last_steps"] if stored is None else stored)
        self._logged = dict(self._logged_before)
        self._keep_state()

    def _read_state(self, place: Path) -> dict[str, Any]:
        """Return the state that an earlier start of the run saved; empty if there is none or it is damaged."""
        try:
            state = json.loads(place.read_text()) if place.exists() else {}
            if not state or state.keys() >= {"run_id", "project", "last_steps"}:
                return dict(state)
        except (ValueError, AttributeError):
            pass
        self._report("state", f"the file {place} is damaged: the tracker starts a new run")
        return {}

    def _write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        new = {n: v for n, v in metrics.items() if step > self._logged_before.get(n, -1)}
        if new:
            self.write_metrics(step, new)
            self._settling.append((monotonic(), dict.fromkeys(new, step)))
            self._keep_state(monotonic() - self.settle_seconds)

    def _keep_state(self, until: float = 0.0) -> None:
        """Save the run's id, and the last step of each metric that was logged by the time `until` (on the clock `monotonic`).

        The library has stored these values by now. Later ones may still be lost, so that a resumed run must log them again.
        """
        while self._settling and self._settling[0][0] <= until:
            self._logged |= self._settling.popleft()[1]
        run = self._run
        assert run is not None
        folder = run.directory / "trackers"
        state = {"run_id": run.run_id, "project": run.project, "last_steps": self._logged}
        try:
            folder.mkdir(exist_ok=True)
            temporary = folder / f".{self.name}.json.tmp"
            temporary.write_text(json.dumps(state))
            temporary.replace(folder / f"{self.name}.json")
        except OSError as error:
            self._report(
                "state",
                f"the folder {folder} can't be written: {error}; a resumed run may log steps twice",
            )


def _number(value: object) -> float | None:
    """Return a metric as a float; None if it is not a number."""
    if isinstance(value, str):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _described(error: BaseException) -> str:
    """Return the beginning of an error's text, since a service's error may be a whole page."""
    text = str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
    return text[:500]


def as_markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return sample rows as a Markdown table with these columns."""

    def cell(value: object) -> str:
        text = str(value).replace("\x00", "�").replace("|", "\\|")
        return text.replace("\n", "<br>")

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the column names of a table of samples, with prompt, response and score first."""
    names = dict.fromkeys(["prompt", "response", "score"])
    return [*names, *(n for n in dict.fromkeys(k for row in rows for k in row) if n not in names)]
