"""The position of a run, and the writing and reading of its checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from dovetail.checkpoint.disk import write_whole
from dovetail.checkpoint.mark import Mark
from dovetail.checkpoint.plugin_states import check_states, read_states, write_states
from dovetail.checkpoint.store import CheckpointStore
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.dispatch.future import Future
from dovetail.errors import CheckpointError
from dovetail.interfaces.plugin import Plugin
from dovetail.run.requeue import summary_of
from dovetail.sections import RunConfig
from dovetail.telemetry.run_directory import RunDirectory

STATE_SCHEMA = 4


@attrs.frozen(kw_only=True)
class RunState:
    """The run's position. All other content of a checkpoint is the state of a part of the run."""

    step: int = 0
    """Number of finished steps."""
    validated: bool = False
    """Whether the run has evaluated held-out rows at least once."""
    train_seconds: float = 0.0
    """Wall time of the run so far, over all processes, including steps that a resumed process repeated."""


@attrs.frozen(kw_only=True)
class CheckpointInProgress:
    """A checkpoint whose files are being written."""

    step: int
    """Number of steps that were finished when the save began."""
    path: Path
    """Path of the complete checkpoint."""
    blocking_seconds: float
    """Seconds that training waited: for the copy of its state, or, without `trainer.async_save`, for the whole save."""
    seconds: Future[float]
    """Future of the total seconds of the save; raises the error of a failed save."""


@attrs.define(kw_only=True, eq=False)
class RunCheckpoints:
    """Writer and reader of checkpoints, from which a run continues as if it had not been interrupted.

    Args:
        store: the store of the checkpoints.
        groups: worker groups whose weights change, by role.
        loader: the loader of the training prompts.
        ledger: the record of which training prompts are in flight, used or dropped.
        plugins: the controller's plugins whose `state()` is kept, by name.
        asynchronous: whether to write while training continues.
        expected_bytes: the estimated size of a checkpoint; 0 if unknown.
    """

    store: CheckpointStore
    _groups: Mapping[str, Any]
    _loader: PromptLoader
    _ledger: Ledger
    _plugins: Mapping[str, Plugin]
    _asynchronous: bool = True
    _expected_bytes: int = 0

    def keep(self, name: str, part: Any) -> None:
        """Add a further part of the run, whose `state()` every checkpoint keeps under `name`."""
        self._plugins = {**self._plugins, name: part}

    def check_states(self) -> None:
        """Check that a checkpoint can keep every plugin's state, so that a faulty state ends the run before its first step.

        Raises:
            CheckpointError: a plugin's state holds what a checkpoint can't keep.
        """
        check_states(self._plugins)

    def save(self, state: RunState, mark: Mark | None = None) -> CheckpointInProgress:
        """Begin an atomic checkpoint of the current model, optimizer, loader, ledger and plugin states. Saves do not overlap.

        Args:
            state: the run's position.
            mark: metric and value if this is the best checkpoint so far.

        Raises:
            DiskFullError: the disk has no room for the checkpoint.
            CheckpointError: the disk is not writable, or a plugin's state holds what a checkpoint can't keep.
        """
        began = time.monotonic()
        with ExitStack() as unfinished:
            directory = unfinished.enter_context(
                self.store.saving(state.step, self._expected_bytes, mark)
            )
            # Plugins' states come first: one may be refused, and writing the weights takes long.
            plugins = write_states(directory, self._plugins)
            document = {
                "schema": STATE_SCHEMA,
                "run": attrs.asdict(state),
                "loader": self._loader.state(),
                "ledger": self._ledger.state(),
                "plugins": plugins,
            }
            (directory / "state.json").write_text(json.dumps(document, indent=1))
            for role, group in self._groups.items():
                if self._asynchronous:
                    unfinished.callback(_finish_save, group)
                    group.begin_save(directory / role).result()
                else:
                    group.save(directory / role).result()
            complete = unfinished.pop_all().close

        def finish() -> float:
            complete()
            return time.monotonic() - began

        blocking = time.monotonic() - began
        seconds = Future.in_thread(finish, name="dovetail-checkpoint")
        if not self._asynchronous:
            blocking = seconds.result()
        return CheckpointInProgress(
            step=state.step,
            path=self.store.path(state.step),
            blocking_seconds=blocking,
            seconds=seconds,
        )

    def export(self, directory: Path, checkpoint: Path | None = None) -> None:
        """Write the actor in Hugging Face format; an existing model is replaced as a whole.

        Args:
            directory: the directory of the model.
            checkpoint: the checkpoint whose weights are loaded into the actor first; None exports the current weights.

        Raises:
            CheckpointError: the model can't be written, or the checkpoint is damaged.
        """
        actor = self._groups["actor"]
        if checkpoint is not None:
            self.store.verify(checkpoint)
            actor.load(checkpoint / "actor").result()
        write_whole(directory, lambda place: actor.export(place).result())

    def not_trained(self, path: Path) -> list[str]:
        """Return the roles whose weights a checkpoint contains, but which the run does not train."""
        roles = (place.name for place in path.iterdir() if place.is_dir())
        return sorted(role for role in roles if role not in self._groups)

    def restore(self, path: Path) -> RunState:
        """Restore the state of every part of the run from a checkpoint, and return the position.

        Raises:
            CheckpointError: the checkpoint is damaged, or written by an unknown version.
        """
        self.store.verify(path)
        document: dict[str, Any] = json.loads((path / "state.json").read_text())
        if document.get("schema") != STATE_SCHEMA:
            raise CheckpointError(
                f"checkpoint {path} has state schema {document.get('schema')!r}, not {STATE_SCHEMA}: resume with the dovetail-core that wrote it"
            )
        for role, group in self._groups.items():
            if not (path / role).is_dir():
                raise CheckpointError(
                    f"the checkpoint {path} has no state of the role {role}: the run that wrote it had no such role",
                    hint="resume with the algorithm of that run, or start a new run",
                )
            group.load(path / role).result()
        self._loader.load_state(document["loader"])
        self._ledger.load_state(document["ledger"])
        for name, plugin_state in read_states(path, document["plugins"]).items():
            if name in self._plugins:
                self._plugins[name].load_state(plugin_state)
        return RunState(**document["run"])


def _finish_save(group: Any) -> None:
    group.finish_save().result()


def with_earlier_seconds(state: RunState, directory: RunDirectory) -> RunState:
    """Return the state with `train_seconds` from the run's earlier `summary.json`, if one was written and has more seconds.

    These seconds include time after the checkpoint, such as the last validation and unfinished steps.
    """
    try:
        seconds = float(summary_of(directory)["train_seconds"])
    except (KeyError, TypeError, ValueError):
        return state
    return attrs.evolve(state, train_seconds=max(state.train_seconds, seconds))


def with_streaming_of(checkpoint: Path | None, config: RunConfig) -> RunConfig:
    """Return the config, with `data.streaming=auto` replaced by the choice of the run that wrote the checkpoint, if there is one."""
    if checkpoint is None or config.data.streaming != "auto":
        return config
    try:
        streamed = json.loads((checkpoint / "state.json").read_text())["loader"]["streamed"]
    except (OSError, ValueError, LookupError):  # `restore` reports it
        return config
    return attrs.evolve(config, data=attrs.evolve(config.data, streaming=streamed))
