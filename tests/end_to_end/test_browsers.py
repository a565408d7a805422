"""Programs with headless browsers, side by side on a local site: each has its own, and is trained on as served."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest
from engines_here import needs
from gateway_episodes import run_command

from dovetail.interfaces import RolloutRequest

pytestmark = [
    pytest.mark.proofs,
    pytest.mark.timeout(1800),
    needs("openai"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
        reason="there is no Chromium here; apt-get install chromium",
    ),
]
CALL = '<tool_call>\n{"name": "click", "arguments": {"link": "%s"}}\n</tool_call>'


class Site(ThreadingHTTPServer):
    """A counter for each visitor, told apart by a cookie. The first click is answered once so many visitors are there.

    Attributes:
        counters: clicks of each visitor.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, visitors: int) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.counters: dict[int, int] = {}
        self.together = threading.Barrier(visitors, timeout=900)
        self.numbers = count(1)


class _Pages(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        """Answer `/` with the visitor's counter, and `/add` after it has risen by 1."""
        if self.path not in ("/", "/add"):
            self.send_error(404)
            return
        _, _, cookie = self.headers.get("cookie", "").partition("visitor=")
        visitor = int(cookie) if cookie else next(self.server.numbers)
        counters = self.server.counters
        counters.setdefault(visitor, 0)
        if self.path == "/add":
            if not counters[visitor]:
                self.server.together.wait()
            counters[visitor] += 1
        text = f"<p>visitor {visitor}, {counters[visitor]} clicks</p><a href='/add'>add one</a>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("set-cookie", f"visitor={visitor}")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with Site(request.param) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site
        site.shutdown()


def clicking(request: RolloutRequest, _prompt: str) -> str:
    """Click three times, once where nothing is, and answer."""
    links = ("add one", "add two", "add one", "add one")
    turn = request.streams[0].turn
    return CALL % links[turn] if turn < len(links) else "three clicks"


@pytest.mark.parametrize("site", [2, 16], indirect=True)
def test_browsers_side_by_side_are_each_a_programs_own(
    site: Site, root: Path, tmp_path: Path
) -> None:
    browsers = site.together.parties
    drawn = run_command(
        [sys.executable, str(root / "examples" / "programs" / "with_browser.py")],
        clicking,
        tmp_path,
        n=browsers,
        concurrency=browsers,
        models=("*",),
        extra_info={"url": f"http://127.0.0.1:{site.server_port}/"},
    )
    drawn.audit()
    seen = set()
    for sample in drawn.samples:
        assert sample.score == 1, sample.outcome
        assert sample.trajectory is not None
        assert len(sample.sequences) == 1
        shown = [m["content"] for turn in sample.trajectory.turns for m in turn.observed]
        visitor = shown[0].partition(",")[0]
        assert [page.partition("\n")[0] for page in shown] == [
            f"{visitor}, 1 clicks",
            "error: the page has no link 'add two'",
            f"{visitor}, 2 clicks",
            f"{visitor}, 3 clicks",
        ]
        seen.add(visitor)
    assert len(seen) == browsers
    assert sorted(site.counters.values()) == [3] * browsers
    assert not left_of(tmp_path)


def left_of(folder: Path) -> list[str]:
    """Processes whose command line names a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((place / "cmdline").read_bytes().decode("utf-8", "replace"))
    return [line for line in found if f"{folder}/programs" in line]
