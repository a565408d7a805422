"""The report holds everything itself, escapes what users wrote, and stands whatever files are missing."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest

from dovetail.telemetry import write_report
from dovetail.telemetry.jsonl import append_rows

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags, addresses, styles and visible text of a page; complains where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attributes if name in {"src", "href", "xlink:href"}
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data.strip())

    @property
    def visible(self):
        return " ".join(filter(None, self.text))


def page_of(directory):
    return Page(write_report(directory).read_text())


def test_the_report_shows_the_run(finished):
    page = page_of(finished.path)
    for expected in (
        "arithmetic/first",
        "completed",
        "Validation accuracy, before → after 25.0% → 75.0%",
        "Training time 1 min 30 s",
        "Seed 3",
        "KL to reference",
        "rollout 0.40 s, 40%",
        "timeout 1",
        "actor/grad_norm not finite at 3",
        "Early: step 1",
        "Late: step 6",
        "hf 0.1.0",
        "path: tiny",
    ):
        assert expected in page.visible
    assert page.tags.count("svg") == 7


def test_nothing_is_fetched_from_anywhere(finished):
    text = write_report(finished.path).read_text()
    page = Page(text)
    assert all(address.startswith("#") for address in page.addresses)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    without_names = text.replace("http://www.w3.org/2000/svg", "").replace(
        "http://www.w3.org/1999/xlink", ""
    )
    assert "//" not in re.sub(r"<pre>.*?</pre>", "", without_names, flags=re.DOTALL)
    assert "@import" not in text


def test_charts_follow_the_page_in_light_and_dark(finished):
    text = write_report(finished.path).read_text()
    assert "prefers-color-scheme: dark" in text
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []
        assert "var(--series-1)" in svg


EVIL = "<script>alert('x')</script><img src=//e.vil/p onerror=alert(1)>{{ 'ab' ~ 'cd' }}"


def test_what_users_wrote_is_escaped_everywhere(finished):
    finished.write_samples(
        6,
        [
            {"prompt": [{"role": EVIL, "content": EVIL}, {"role": "user", "content": EVIL}], "response": EVIL, "score": 0.0, "ground_truth": EVIL},
            {"prompt": EVIL, "response": None, "score": None, "failure": {"kind": "exception", "message": EVIL}},
        ],
    )  # fmt: skip
    append_rows(finished.metrics, [{"step": 6, f"val/{EVIL}/mean@1": 0.5, "val/b/mean@1": 0.5, f"time/{EVIL[:8]}": 1.0, "actor/<b>": None}])  # fmt: skip
    append_rows(finished.events, [{"level": "error", "event": EVIL}])
    finished.write_text("config.yaml", f"project: {EVIL}\n")
    finished.write_json("plugins.lock.json", {"plugins": [{"name": EVIL}]})
    finished.write_json("summary.json", {"status": EVIL})
    page = page_of(finished.path)
    assert page.visible.count("<script>alert('x')</script>") >= 9
    assert not {"script", "img"} & set(page.tags)
    assert "abcd" not in page.visible


def test_a_run_killed_before_its_first_step_has_a_report(run):
    page = page_of(run.path)
    assert "unfinished" in page.visible
    assert page.visible.count("not measured in this run") == 6


def test_torn_and_strange_files_are_no_trouble(finished):
    finished.summary.write_text('{"status": "comp')
    finished.plugin_lock.write_text("")
    finished.config.write_bytes(b"seed: \xff\xfe")
    with finished.metrics.open("a") as file:
        file.write('{"step": 7, "rew')
    with finished.write_samples(6, []).open("a") as file:
        file.write('{"prompt": "torn')
    (finished.path / "samples" / "notes.txt").write_text("mine")
    page = page_of(finished.path)
    assert "unfinished" in page.visible
    assert "Late: step 6" in page.visible


@pytest.mark.parametrize("value", [None, 1.0])
def test_metrics_of_one_step_or_none_finite_are_drawn(run, value):
    names = ("reward/mean", "val/mean@1", "actor/kl", "actor/entropy", "time/step", "time/update")
    append_rows(run.metrics, [{"step": 1, **dict.fromkeys(names, value)}])
    page = page_of(run.path)
    assert page.tags.count("svg") == (1 if value is None else 5)


def test_the_kl_of_the_update_stands_in_where_there_is_no_reference(run):
    append_rows(
        run.metrics, [{"step": 1, "actor/approx_kl": 0.01}, {"step": 2, "actor/approx_kl": 0.02}]
    )
    visible = page_of(run.path).visible
    assert "KL of the update" in visible
    assert "KL to reference" not in visible


def test_a_long_run_is_reported_within_three_seconds(run):
    rows = [
        {
            "step": step,
            "reward/mean": step % 7 / 7,
            "val/mean@1": step % 5 / 5,
            "actor/kl": step / 1e4,
            "actor/entropy": 1.0,
            "response_length/mean": 100.0 + step,
            "actor/grad_norm": 0.5,
            "time/step": 2.0,
            "time/rollout": 1.0,
            "time/update": 0.9,
        }
        for step in range(2000)
    ]
    append_rows(run.metrics, rows)
    write_report(run.path)
    began = time.process_time()
    path = write_report(run.path)
    assert time.process_time() - began < 3.0
    assert path.stat().st_size < 3_000_000


def test_pyplot_stays_unimported_and_settings_untouched(finished):
    script = (
        "import sys\n"
        "from dovetail.telemetry import write_report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "write_report(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "import matplotlib\n"
        "assert matplotlib.rcParams['svg.fonttype'] == 'path'\n"
    )
    subprocess.run([sys.executable, "-c", script, str(finished.path)], check=True, timeout=60)
