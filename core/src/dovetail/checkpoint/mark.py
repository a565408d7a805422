"""The file `best` beside a run's checkpoints: which one is marked as the best, and by which metric."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import CheckpointError

BEST = "best"
"""The file beside the checkpoints that names the best one."""


@attrs.frozen(kw_only=True)
class Mark:
    """The metric and value by which a checkpoint was the best one when it was saved."""

    metric: str
    """Name of the validation metric."""
    value: float
    """Value of the metric at the checkpoint's step; finite."""


@attrs.frozen(kw_only=True)
class BestCheckpoint:
    """The content of the file `best`, which names the best checkpoint of a run."""

    path: Path
    """Directory of the checkpoint."""
    metric: str
    """The validation metric by which the checkpoint is the best."""
    value: float
    """Value of the metric at the checkpoint's step."""

    @property
    def step(self) -> int:
        """Number of finished steps when the checkpoint was saved."""
        return int(self.path.name.rpartition("_")[2])

    def to_summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`: `step`, `metric`, `value`, `path`."""
        return {
            "step": self.step,
            "metric": self.metric,
            "value": self.value,
            "path": str(self.path),
        }

    def to_json(self) -> str:
        """Return the content of the file `best`.

        Raises:
            CheckpointError: the value is not finite.
        """
        if not math.isfinite(self.value):
            raise CheckpointError(
                f"checkpoint {self.path.name} can't be marked as the best: its {self.metric or 'value'} is {self.value}; "
                "expected a finite number"
            )
        fields = {"checkpoint": self.path.name, "metric": self.metric, "value": self.value}
        return json.dumps(fields) + "\n"

    @classmethod
    def read(cls, directory: Path) -> BestCheckpoint | None:
        """Read the file `best` in a folder; return None if there is no such file.

        Raises:
            CheckpointError: the file is damaged.
        """
        file = directory / BEST
        try:
            fields = json.loads(file.read_text())
            path = directory / Path(fields["checkpoint"]).name
            return cls(path=path, metric=str(fields["metric"]), value=float(fields["value"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(
                f"the file {file}, which names the best checkpoint, is damaged: {type(error).__name__}: {error}",
                hint="delete the file; the next validation then marks the best checkpoint again",
            ) from error
