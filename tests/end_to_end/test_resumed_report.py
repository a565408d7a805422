"""The report of a run that was killed and continued with another setting, as a headless browser draws it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from kills import POINTS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.usefixtures("report")
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here; apt-get install chromium")
def test_every_curve_marks_where_a_killed_run_was_resumed_and_what_was_changed(
    config: Path, tmp_path: Path, start: Callable[..., Any]
) -> None:
    function, when = POINTS["pointer swap"][1]
    killed = start("train", str(config), kill=(function, 2, when)).wait()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = tmp_path / "runs" / "tests" / "run"
    resumed = start("resume", str(run), "actor.optim.lr=5.0e-3").wait()
    assert resumed.returncode == 0, resumed.stderr
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    page = subprocess.run(
        [CHROMIUM, *options, "--virtual-time-budget=20000", "--dump-dom", (run / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    ).stdout  # fmt: skip
    curves = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(curves) > 5
    for kind in ("resumed", "setting"):
        assert [svg.count(f'class="mark {kind}"') for svg in curves] == [1] * len(curves)
    happened = unescape(page[page.index("What happened when") :].partition("</table>")[0])
    rows = re.findall(r'<td class="number">(\d+)</td><td>(.*?)</td>', happened)
    assert rows == [("2", "resumed"), ("2", "changed actor.optim.lr: 0.01 → 0.005")]
