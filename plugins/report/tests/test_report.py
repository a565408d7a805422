"""The report is self-contained, escapes users' texts, and works whatever files are missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dovetail_report
from dovetail.telemetry.jsonl import append_rows
from dovetail_report import write_report
from dovetail_report.recipe import algorithm_line

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags, addresses, styles and visible text of a page; fails if tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.text, self.drawn = [], [], [], [], 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.drawn += any(name == "data-chart" for name, _ in attributes)
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
        if self.open and self.open[-1] not in ("style", "script"):
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
        "Validation score, before → after 0.250 → 0.750",
        "Training time 1 min 30 s",
        "Seed 3",
        "KL to reference",
        "rollout 0.40 s, 40%",
        "timeout 1",
        "actor/grad_norm not finite at 3",
        "hf 0.1.0",
        "path: tiny",
    ):
        assert expected in page.visible
    assert page.drawn == 7


def test_nothing_is_fetched_but_from_the_folder_beside_the_page(finished):
    text = write_report(finished.path).read_text()
    page = Page(text)
    assert page.addresses == []
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert re.findall(r"src: *([^ ]+)", text) == ["`report/${name}.js`"]


def test_charts_follow_the_page_in_light_and_dark():
    text = (Path(dovetail_report.__file__).parent / "charts.js").read_text()
    assert re.findall(r"#[0-9a-fA-F]{6}\b", text) == []
    assert "var(--series-" in text


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
    assert page.visible.count("<script>alert('x')</script>") >= 6
    assert page.tags.count("script") == 2 + 3  # data, code; an index and two steps
    assert "img" not in page.tags
    assert "abcd" not in page.visible


def test_a_run_killed_before_its_first_step_has_a_report(run):
    page = page_of(run.path)
    assert "killed" in page.visible
    assert page.visible.count("not measured in this run") == 6


def test_torn_and_strange_files_are_no_trouble(finished, samples_of):
    finished.summary.write_text('{"status": "comp')
    (finished.path / "plugins.lock.json").write_text("")
    finished.config.write_bytes(b"seed: \xff\xfe")
    with finished.metrics.open("a") as file:
        file.write('{"step": 7, "rew')
    with finished.write_samples(6, []).open("a") as file:
        file.write('{"prompt": "torn')
    (finished.path / "samples" / "notes.txt").write_text("mine")
    page = page_of(finished.path)
    assert "killed" in page.visible
    assert samples_of(finished, "step_6") == []


@pytest.mark.parametrize("value", [None, 1.0])
def test_metrics_of_one_step_or_none_finite_are_drawn(run, value):
    names = (
        "reward/mean",
        "val/mean@1",
        "actor/kl",
        "actor/entropy",
        "time/step",
        "time/update_actor",
    )
    append_rows(run.metrics, [{"step": 1, **dict.fromkeys(names, value)}])
    page = page_of(run.path)
    assert page.drawn == (1 if value is None else 5)


def test_the_kl_of_the_update_stands_in_where_there_is_no_reference(run):
    append_rows(
        run.metrics, [{"step": 1, "actor/approx_kl": 0.01}, {"step": 2, "actor/approx_kl": 0.02}]
    )
    visible = page_of(run.path).visible
    assert "of the update" in visible
    assert "KL to reference" not in visible


def test_the_kl_of_a_penalty_in_the_reward_is_the_kl_to_the_reference(run):
    append_rows(run.metrics, [{"step": 1, "actor/approx_kl": 0.5, "reward/kl_penalty": 0.25}])
    visible = page_of(run.path).visible
    assert "KL to reference 0.250" in visible
    assert "KL of the update" not in visible


def test_critic_and_filters_have_charts_only_where_they_were_logged(finished):
    titles = ("Value loss", "Explained variance", "Kept groups", "Rounds of generation")
    before = page_of(finished.path)
    assert not any(title in before.visible for title in titles)
    figures = {
        "critic/value_loss": 0.5,
        "critic/explained_variance": 0.25,
        "filter/kept_groups": 8.0,
        "filter/rounds": 2.0,
    }
    append_rows(finished.metrics, [{"step": step, **figures} for step in (1, 2)])
    after = page_of(finished.path)
    assert all(title in after.visible for title in titles)
    assert after.drawn == before.drawn + 4


def test_the_best_checkpoint_and_the_steps_behind_the_rewards_are_told(finished):
    best = {"step": 3, "metric": "val/mean@4", "value": 0.648, "path": "/r/checkpoints/step_3"}
    finished.write_json("summary.json", {"status": "completed", "best": best})
    visible = page_of(finished.path).visible
    assert "Best\u2002step 3, val/mean@4 0.648\u2002/r/checkpoints/step_3" in visible
    assert "Mean reward, first 3 steps → last 3 0.200 → 0.500" in visible


ALGORITHM = """\
algorithm:
  preset: {name: dapo}
  advantage: {name: grpo, norm_by_std: true}
  policy_loss:
    name: ppo_clip
  loss_aggregation: token_mean
critic:
  value_clip: 0.5

  loss_aggregation:
    name: chosen_for_values
seed: 3
"""


def test_the_head_names_the_algorithm(finished):
    finished.write_text("config.yaml", ALGORITHM)
    line = "preset dapo · grpo advantages · ppo_clip policy loss · token_mean aggregation"
    assert line in page_of(finished.path).visible
    assert algorithm_line("algorithm: {advantage: {name: gae}, preset: null}") == "gae advantages"


@pytest.mark.parametrize("config", ["", "algorithm: [", "algorithm: 3", "- a", "algorithm: {advantage: {name: 3}}"])  # fmt: skip
def test_a_config_that_names_no_algorithm_gives_no_line(config):
    assert algorithm_line(config) == ""


def test_the_section_of_the_critic_is_shown_where_there_was_one(finished):
    finished.write_text("config.yaml", ALGORITHM)
    without = page_of(finished.path).visible
    assert "chosen_for_values" not in without
    assert "critic:" not in without
    assert "seed: 3" in without
    append_rows(finished.metrics, [{"step": 6, "critic/value_loss": 0.5}])
    assert "chosen_for_values" in page_of(finished.path).visible


def test_a_warning_is_shown_with_its_detail(run):
    rows = [
        {"level": "warning", "event": "plugin_changed", "detail": f"engine/{name} was version 1"}
        for name in ("a", "b", "a")
    ]
    append_rows(run.events, rows)
    visible = page_of(run.path).visible
    assert "warning plugin_changed: engine/a was version 1 2" in visible
    assert "warning plugin_changed: engine/b was version 1 1" in visible


def test_a_run_of_one_step_has_one_reward(run):
    append_rows(run.metrics, [{"step": 1, "reward/mean": 0.5, "filter/rounds": 2.0}])
    visible = page_of(run.path).visible
    assert "Mean reward 0.500" in visible
    assert "0.500 → 0.500" not in visible


def test_a_long_run_is_reported_in_a_moment(run):
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
            "time/update_actor": 0.9,
        }
        for step in range(20_000)
    ]
    append_rows(run.metrics, rows)
    began = time.process_time()
    path = write_report(run.path)
    assert time.process_time() - began < 15.0
    assert path.stat().st_size < 2_000_000


def test_a_report_loads_no_library_of_training(finished):
    script = (
        "import sys\n"
        "from dovetail_report import write_report\n"
        "write_report(sys.argv[1])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(finished.path)], check=True)


def test_warnings_resumes_and_changed_settings_are_marks(run):
    rows = [{"step": step, "response_length/clip_ratio": 0.91} for step in range(1, 9)]
    append_rows(run.metrics, rows)
    append_rows(run.events, [{"event": "setting changed", "step": 4, "detail": "seed: 1 → 2"}, {"event": "continues from a checkpoint", "step": 4}])  # fmt: skip
    page = page_of(run.path)
    assert "4 changed seed: 1 → 2 4 resumed" in page.visible
    data = json.loads(re.search(r'id="data">(.*?)</script>', run.report.read_text())[1])
    assert [(m["step"], m["kind"]) for m in data["marks"]] == [(1, "warning"), (4, "setting"), (4, "resumed")]  # fmt: skip


def test_every_share_of_clipped_tokens_is_a_line_of_one_chart(run, charts_of):
    names = ("actor/clip_frac", "actor/clip_frac_upper", "critic/value_clip_frac")
    append_rows(run.metrics, [{"step": s, **dict.fromkeys(names, 0.25)} for s in (1, 2)])
    assert [line["name"] for line in charts_of(run)["Clipped tokens"]["lines"]] == [*names]


def test_the_reward_stands_in_its_percentiles(run, charts_of):
    append_rows(run.metrics, [{"step": s, "reward/mean": 0.5, "reward/p10": 0.1, "reward/p90": 0.9} for s in (1, 2)])  # fmt: skip
    (line,) = charts_of(run)["Reward"]["lines"]
    assert (line["low"], line["high"]) == ([0.1, 0.1], [0.9, 0.9])


def test_a_long_curve_is_drawn_as_means_within_its_extremes(run, charts_of):
    rows = [{"step": s, "actor/grad_norm": 100.0 if s == 7777 else s % 2} for s in range(20_000)]
    append_rows(run.metrics, rows)
    (line,) = charts_of(run)["Gradient norm"]["lines"]
    assert len(line["x"]) == len(line["y"]) == 1000
    assert max(line["high"]) == 100.0
    assert max(line["y"]) < 6.0
    assert min(line["low"]) == 0.0


def test_what_shows_a_run_that_can_not_learn_is_drawn(run):
    names = {
        "response_length/clip_ratio": "Cut responses",
        "advantage/zero_signal_groups": "Groups without signal",
        "actor/lr": "Learning rate",
        "logprob_check/prob_diff_mean": "Rollout against trainer",
        "weight_check/mean_difference": "Weight check",
    }
    append_rows(run.metrics, [{"step": step, **dict.fromkeys(names, 0.5)} for step in (1, 2)])
    page = page_of(run.path)
    assert page.drawn == len(names)
    assert all(label in page.visible for label in names.values())


def test_what_keeps_a_run_from_learning_stands_at_the_top(run):
    rows = [{"step": step, "response_length/clip_ratio": 0.91} for step in range(1, 9)]
    append_rows(run.metrics, rows)
    page = page_of(run.path)
    top, _, _ = page.visible.partition("Steps 8")
    assert "Since step 1 : for 5 steps" in top
    assert "raise data.max_response_length" in top
    append_rows(
        run.metrics, [{"step": step, "response_length/clip_ratio": 0.1} for step in range(9, 14)]
    )
    assert "Steps 1 to 8 : for 5 steps" in page_of(run.path).visible


def test_a_healthy_run_has_no_warning_at_the_top(finished):
    assert "What may keep this run from learning" not in page_of(finished.path).visible


def test_memory_is_drawn_in_gib(run):
    names = ("max_memory_allocated_bytes", "max_memory_reserved_bytes", "rss_bytes")
    rows = [{"step": step, **{f"actor/{name}": 1.5 * 2**30 for name in names}} for step in (1, 2)]
    append_rows(run.metrics, rows)
    page = page_of(run.path)
    assert page.drawn == len(names)
    assert page.visible.count("1.5 → 1.5") == len(names)
    assert "Host memory of the actor's largest process, GiB" in page.visible
