"""Fixtures: a run directory, empty or of a finished run of a few steps; and its report, as data and in a browser."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.telemetry import RunDirectory
from dovetail_report import write_report
from dovetail_sdk.testing import finished_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A claimed, empty run directory."""
    return RunDirectory.create(tmp_path / "runs" / "arithmetic" / "first")


@pytest.fixture
def finished(run: RunDirectory) -> RunDirectory:
    """A run of six steps."""
    return finished_run(run)


@pytest.fixture
def charts_of() -> Callable[[RunDirectory], dict[str, dict[str, Any]]]:
    """A function that writes a report and returns what it draws: each chart by its title."""

    def read(run: RunDirectory) -> dict[str, dict[str, Any]]:
        text = write_report(run.path).read_text()
        (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
        return {chart["title"]: chart for chart in json.loads(data)["charts"]}

    return read


@pytest.fixture
def samples_of() -> Callable[..., Any]:
    """A function that writes a report and returns the content of a file beside it, as the page unpacks it."""

    def read(run: RunDirectory, name: str = "step_1") -> Any:
        write_report(run.path)
        script = (run.path / "report" / f"{name}.js").read_text()
        match = re.fullmatch(r'dovetail\("(\w+)", "([A-Za-z0-9+/=]*)"\);\n', script)
        assert match is not None
        assert match[1] == name
        return json.loads(gzip.decompress(base64.b64decode(match[2])))

    return read


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., str]:
    """A function that opens the report of a run in a browser, runs JavaScript in it, and returns what it returned as text.

    The JavaScript is the body of an async function, which begins when the list of samples is there; `pause(condition)` waits.
    `alone` opens a copy of the page that has no folder beside it.
    """
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; apt-get install chromium")

    def opened(run: RunDirectory, script: str, *, alone: bool = False) -> str:
        page = write_report(run.path)
        probe = f"""<script>
        /* The clock of a page that is dumped runs ahead of what the browser does beside it, but stands while a file is loaded. */
        const anyFile = (number) => new Promise((go) => {{ const image = new Image(); image.onload = image.onerror = go; image.src = `none-${{number}}.png`; }});
        const pause = async (condition) => {{ for (let n = 0; n < 600 && !condition(); n++) {{ await anyFile(n); await new Promise((go) => setTimeout(go, 20)); }} }};
        (async () => {{
          const browser = document.getElementById("browser");
          await pause(() => document.querySelector(".plot svg") || !document.querySelector(".plot"));
          if (browser) await pause(() => browser.dataset.ready);
          const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", {{ key, bubbles: true }}));
          const seen = document.createElement("textarea");
          seen.id = "seen";
          try {{ seen.textContent = await (async () => {{ {script} }})(); }} catch (error) {{ seen.textContent = "error " + error; }}
          document.body.replaceChildren(seen); /* half a surrogate pair elsewhere would end --dump-dom */
        }})();
        </script>"""
        copy = (tmp_path if alone else run.path) / "probed.html"
        copy.write_text(page.read_text().replace("</body>", f"{probe}</body>"))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [CHROMIUM, *options, profile, "--virtual-time-budget=20000", "--dump-dom", copy.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )  # fmt: skip
        match = re.search(r'<textarea id="seen">(.*?)</textarea>', done.stdout, flags=re.DOTALL)
        assert match is not None, done.stdout[-2000:]
        return html.unescape(match[1])

    return opened
