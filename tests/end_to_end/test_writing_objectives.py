"""Every file that docs/writing-objectives.md shows runs as it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def home(root: Path, tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    text = (root / "docs" / "writing-objectives.md").read_text()
    shown = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    assert text.count("```python") == len(shown) == 3
    (sft,) = re.findall(r"```yaml\n(# sft\.yaml\n.*?)```", text, re.DOTALL)
    for file, code in (*shown, ("sft.yaml", sft)):
        (tmp_path / file).write_text(code)
    return tmp_path


@pytest.mark.nightly
def test_the_loss_falls(home: Path, tiny: Path) -> None:
    done = subprocess.run(
        [sys.executable, "train.py", str(tiny)],
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, third = map(float, done.stdout.split())
    assert third < second < first


@pytest.mark.nightly
def test_a_run_on_conversations_learns_them(home: Path, tiny: Path) -> None:
    rows = [{"prompt": f"{a} + {b} =", "response": str(a + b)} for a in range(4) for b in range(4)]
    (home / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run(
        [sys.executable, "-m", "dovetail", "train", "sft.yaml", f"model.path={tiny}"],
        cwd=home,
        capture_output=True,
        check=True,
    )
    lines = (home / "runs" / "dovetail" / "default" / "metrics.jsonl").read_text().splitlines()
    first, *between, last = (json.loads(line)["actor/nll"] for line in lines if "nll" in line)
    assert len(between) == 2
    assert last < first


def test_the_suite_passes(home: Path) -> None:
    plain = (
        "-p",
        "no:cacheprovider",
        "-p",
        "no:jaxtyping",
        "--rootdir",
        ".",
        "--import-mode=prepend",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plain, "test_my_objective.py"],
        cwd=home, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
