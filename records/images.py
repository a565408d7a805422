"""Train the run with images of the end-to-end tests: `python records/images.py DIRECTORY key=value …`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "end_to_end"))

from test_images import write_config

from dovetail.cli.train import run_training

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    run_training((write_config(directory),), tuple(sys.argv[2:]))
