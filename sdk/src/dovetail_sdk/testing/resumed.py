"""A plugin's state as a resumed run gets it, through a checkpoint on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dovetail.checkpoint.plugin_states import read_states, write_states
from dovetail.checkpoint.store import CheckpointStore
from dovetail.interfaces.plugin import Plugin


def resumed_state(plugin: Plugin, directory: Path) -> dict[str, Any]:
    """Write the plugin's state to a checkpoint, and return the state that `load_state` would get from the checkpoint.

    Args:
        plugin: the plugin whose state is saved.
        directory: the directory of the checkpoint.

    Raises:
        CheckpointError: the state has a value that a checkpoint can't store.
    """

    def write(folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(write_states(folder, {"plugin": plugin})))

    store = CheckpointStore(directory)
    checkpoint = store.save(0, write)
    store.verify(checkpoint)
    states = json.loads((checkpoint / "state.json").read_text())
    return read_states(checkpoint, states)["plugin"]
