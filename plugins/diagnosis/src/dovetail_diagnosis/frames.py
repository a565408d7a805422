"""A run's files as pandas data frames."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.config import read_file
from dovetail.errors import DovetailError
from dovetail.telemetry import RunDirectory, read_rows

if TYPE_CHECKING:
    import pandas as pd


@attrs.frozen(kw_only=True, eq=False)
class RunFrames:
    """The records of a run, as data frames.

    Attributes:
        metrics: one row per step, indexed by `step`, and one column per metric. All rows of a step in `metrics.jsonl` are merged; missing
            values are NaN.
        samples: one row per recorded sample. The column `step` has the sample's step, and the column `file` the text `validation` for a
            sample of a validation, `step` for one of training.
        config: the config of the run.
        summary: the content of `summary.json`; empty if there is no such file, as before the first end of the run.
    """

    metrics: pd.DataFrame
    samples: pd.DataFrame
    config: dict[str, Any]
    summary: dict[str, Any]


def load(run: str | os.PathLike[str]) -> RunFrames:
    """Read a run directory, whose run may still be in progress.

    Args:
        run: the run directory, such as `runs/<project>/<experiment>`.

    Raises:
        RunDirectoryError: `run` is not a run directory, or one of its files is damaged.
        DovetailError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise DovetailError(
            "dovetail_diagnosis.load needs pandas, which is not installed",
            hint="pip install pandas",
        ) from error
    directory = RunDirectory.open(run)
    rows = [row for row in read_rows(directory.metrics) if isinstance(row.get("step"), int)]
    metrics = pd.DataFrame(
        rows, columns=["step", *{k: None for r in rows for k in r if k != "step"}]
    )
    samples = [
        {"step": int(number), "file": kind, **row}
        for path in sorted((directory.path / "samples").glob("*_*.jsonl"))
        for kind, _, number in [path.stem.rpartition("_")]
        if number.isdecimal()
        for row in read_rows(path)
    ]
    return RunFrames(
        # Training and validation log the same step in several rows; the last present value counts.
        metrics=metrics.groupby("step").last(),
        samples=pd.DataFrame(samples),
        config=dict(read_file(directory.config).tree) if directory.config.exists() else {},
        summary=directory.read_json("summary.json") if directory.summary.exists() else {},
    )
