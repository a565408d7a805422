"""The format of a training state. Engines share the format, so that one engine can load the state of another.

training.json            version of the format, number of ranks, and number of optimizer steps, in total and for each parameter
weights/*.safetensors    float32 weights
moments/*.safetensors    the optimizer's moments
random-RANK.safetensors  each rank's random state (`dovetail_torch_engines.random_states`)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import CheckpointError

if TYPE_CHECKING:
    from dovetail_torch_engines.ranks import Ranks

FORMAT = 1
"""The version of the format; it changes when older readers could not read a new state."""
TRAINING, WEIGHTS, MOMENTS = "training.json", "weights", "moments"


def emptied(directory: Path, ranks: Ranks) -> None:
    """Create the directory of a training state, and remove the weights and moments of an earlier state. Collective.

    Raises:
        CheckpointError: the directory can't be created; raised on every rank.
    """
    with ranks.together():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if ranks.first:
                # Earlier files, from more ranks or in another layout, would be read as well.
                for part in (WEIGHTS, MOMENTS):
                    shutil.rmtree(directory / part, ignore_errors=True)
        except OSError as error:
            raise unwritable(directory, error) from error


def write_facts(directory: Path, *, ranks: int, optimizer: Mapping[str, Any] | None) -> None:
    """Write `training.json`: the number of ranks and the optimizer's steps.

    Args:
        directory: the directory of the state.
        ranks: the number of ranks that wrote the state.
        optimizer: `steps`, the total, and `parameters`, the number of steps by parameter name; None if there is no optimizer.

    Raises:
        CheckpointError: the file can't be written.
    """
    facts = {"format": FORMAT, "ranks": ranks, "optimizer": optimizer}
    try:
        (directory / TRAINING).write_text(json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise unwritable(directory, error) from error


def read_facts(directory: Path) -> dict[str, Any]:
    """Return the content of `training.json`: `format` (see `FORMAT`), and `ranks` and `optimizer` as given to `write_facts`.

    Raises:
        CheckpointError: the file is missing, unreadable or of another format.
    """
    file = directory / TRAINING
    try:
        facts: Any = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {directory} has no {TRAINING}",
            hint="use another checkpoint: this one is incomplete, or its run did not train this model",
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {file} can't be read: {error}") from error
    found = facts.get("format") if isinstance(facts, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {directory} has format {found!r}; this version reads {FORMAT}",
            hint="resume with the version of Dovetail that wrote the checkpoint",
        )
    return dict(facts)


def was_trained(directory: Path) -> bool:
    """Return whether a training state includes an optimizer's state.

    Raises:
        CheckpointError: there is no training state.
    """
    return read_facts(directory)["optimizer"] is not None


def unwritable(directory: Path, error: BaseException) -> CheckpointError:
    """Return the error for a directory to which a training state can't be written."""
    return CheckpointError(
        f"the training state can't be written to {directory}: {error}",
        hint="see that there is room on the disk, and that every rank sees the directory",
    )
