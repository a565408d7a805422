"""Continuing a run that its directory already holds: the checkpoint to continue from, and changes since the run began."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dovetail.checkpoint.store import CheckpointStore
from dovetail.config.keys import GIVEN
from dovetail.config.layers import read_file
from dovetail.config.load import LoadedConfig
from dovetail.config.plain_yaml import parse
from dovetail.config.serialise import dump_yaml
from dovetail.errors import CheckpointError, ConfigError, RunDirectoryError
from dovetail.run.second_place import SecondPlace
from dovetail.telemetry.run_directory import RunDirectory

_ANOTHER_RUN = ("seed", "model", "data", "ref", "roles", "algorithm", "reward")
"""Sections in which a changed key makes the run another run."""
_OBJECTIVES = ("actor.objective", "critic.objective")
_HOW_TO_RESUME = "trainer.resume"


def changes_of(directory: RunDirectory, loaded: LoadedConfig) -> dict[str, str]:
    """Compare a config with the config of the run in a directory; values from the environment are compared unresolved.

    Returns:
        For each key that differs, except `trainer.resume`, a text `key: before → now`; empty if the run has not yet written its config.

    Raises:
        RunDirectoryError: there are checkpoints but no config.
        ConfigError: the run's config is damaged.
    """
    if not directory.config.exists():
        if not CheckpointStore(directory.checkpoints).saved():
            return {}
        raise RunDirectoryError(
            f"the file {directory.config} is missing; it identifies the run",
            hint="restore it, or start another run with experiment=NAME",
        )
    written = parse(dump_yaml(loaded.config, loaded.from_environment))[0]
    before, now = (dict(_leaves(tree)) for tree in (read_file(directory.config).tree, written))
    return {
        key: f"{key}: {_written(before, key)} → {_written(now, key)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key) and key not in (_HOW_TO_RESUME, GIVEN)
    }


def refuse_another_run(place: object, changes: Mapping[str, str]) -> None:
    """Check that changes of the config do not turn the run at `place`, a directory or an address, into another run.

    Raises:
        ConfigError: a change concerns the model, the data or another section that defines the run.
    """
    if refused := [text for key, text in changes.items() if _makes_another(key)]:
        raise ConfigError(
            f"{place} holds a run with other settings: {'; '.join(refused)}",
            hint="start another run with experiment=NAME, or continue this one with `--accept-changes`; "
            "no run can be continued on other training prompts",
        )


def fetch_copy(
    path: Path, loaded: LoadedConfig, say: Callable[[str], None], *, accept_changes: bool
) -> None:
    """Copy the newest checkpoint at `trainer.copy_to` into the run directory `path`, which is created if missing.

    Nothing is copied into a run directory that has a checkpoint. `say` is called with a message on the copied checkpoint.

    Raises:
        ConfigError: the copied checkpoint belongs to a run with other settings; the run directory is unchanged.
        CheckpointError: the copy is damaged.
    """
    url = loaded.config.trainer.copy_to
    if url is None or CheckpointStore(path / "checkpoints").saved():
        return
    place = SecondPlace(url, RunDirectory(path).name)
    name = place.newest()
    if name is None:
        return
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(place.read_config())
        if not accept_changes:
            refuse_another_run(place.url, changes_of(RunDirectory(Path(folder)), loaded))
    directory = RunDirectory(path) if RunDirectory.begun(path) else RunDirectory.create(path)
    with directory.held():
        place.fetch(name, path)
    say(f"{path} holds no checkpoint: {name} is taken from {place.url}")


def newest_whole(directory: RunDirectory, say: Callable[[str], None]) -> Path | None:
    """Return the newest undamaged checkpoint; None if none was saved. The caller must hold the run's lock.

    Args:
        directory: the directory of the run.
        say: the function called with a message for every newer, damaged checkpoint.

    Raises:
        CheckpointError: every checkpoint is damaged.
    """
    store = CheckpointStore(directory.checkpoints)
    store.recover()
    damages: list[str] = []
    for checkpoint in sorted(directory.checkpoints.glob("step_*"), key=_step, reverse=True):
        try:
            store.verify(checkpoint)
        except CheckpointError as error:
            damages.append(error.message)
        else:
            for damage in damages:
                say(f"{damage}; going back to an earlier checkpoint")
            return checkpoint
    if damages:
        raise CheckpointError(
            f"no checkpoint of the run {directory.path} is intact: {'; '.join(damages)}",
            hint=f"start another run with experiment=NAME, or start this one from the beginning after rm -r {directory.checkpoints}",
        )
    return None


def checkpoint_at(resume: str) -> Path | None:
    """Return the checkpoint that `trainer.resume` names, or the latest one of the run directory that it names; None for auto and never.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if resume in ("auto", "never"):
        return None
    path = Path(resume)
    store = CheckpointStore(path.parent if path.name.startswith("step_") else path / "checkpoints")
    found = path if path in store.saved() else store.latest()
    if found is None:
        raise CheckpointError(
            f"the path of trainer.resume = {resume} holds no checkpoint",
            hint="name a run directory (runs/<project>/<experiment>), or a checkpoint in it (checkpoints/step_N), or set auto or never",
        )
    return found


def summary_of(directory: RunDirectory) -> dict[str, Any]:
    """Return the content of `summary.json`; empty if the file is missing or damaged."""
    try:
        found = directory.read_json("summary.json")
    except RunDirectoryError:
        return {}
    return found if isinstance(found, dict) else {}


def is_finished(directory: RunDirectory) -> bool:
    """Return whether the run in the directory has completed."""
    return bool(summary_of(directory).get("status") == "completed")


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def _makes_another(key: str) -> bool:
    return key.split(".", maxsplit=1)[0] in _ANOTHER_RUN or key.startswith(_OBJECTIVES)


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a config with its key path; a list is one value."""
    if isinstance(value, Mapping) and (value or not path):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _written(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
