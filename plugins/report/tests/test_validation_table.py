"""Validation in the report: a table of the latest figures, and charts with their intervals."""

from __future__ import annotations

from dovetail.telemetry.jsonl import append_rows
from dovetail_report import write_report
from dovetail_report.summary import History
from dovetail_report.validation import source_of, validation_table


def with_ends(name, value, half):
    return {name: value, f"{name}/low": value - half, f"{name}/high": value + half}


METRICS = {
    **with_ends("val/mean@4", 0.5, 0.0213),
    **with_ends("val/pass@1", 0.5, 0.02),
    **with_ends("val/pass@2", 0.625, 0.02),
    **with_ends("val/pass@4", 0.75, 0.03),
    **with_ends("val/best@1", 0.5, 0.03),
    **with_ends("val/best@2", 0.6, 0.03),
    **with_ends("val/best@4", 0.75, 0.03),
    **with_ends("val/openai/gsm8k/mean@4", 0.4, 0.1),
    **with_ends("val/openai/gsm8k/majority@2", 0.45, 0.1),
    **with_ends("val/openai/gsm8k/majority@4", 0.5, 0.1),
    **with_ends("val/b/mean@4", 7.25, 0.25),
    "val/failures": 3.0,
    "val/response_length/mean": 20.0,
}


def test_sources_are_known_by_their_mean_score_alone():
    assert source_of("val/openai/gsm8k/mean@4") == "openai/gsm8k"
    assert source_of("val/gsm8k/acc@1") is None
    assert source_of("val/gsm8k/acc@1", "acc") == "gsm8k"
    for other in ("val/mean@4", "val/mean@4/low", "val/a/mean@4/high", "val/a/pass@4", "a/mean@1"):
        assert source_of(other) is None


def test_the_table_holds_the_latest_validation_without_what_says_the_same():
    history = History([{"step": 0, "val/mean@4": 0.1}, {"step": 8, **METRICS}, {"step": 9}])
    assert validation_table(history) == {
        "step": 8,
        "columns": ["mean@4", "pass@2", "pass@4", "majority@4", "best@4"],
        "rows": [
            ("all", ["0.500 ± 0.021", "62.5% ± 2.0", "75.0% ± 3.0", "", "0.750 ± 0.03"]),
            ("openai/gsm8k", ["0.400 ± 0.1", "", "", "0.500 ± 0.1", ""]),
            ("b", ["7.250 ± 0.25", "", "", "", ""]),
        ],
    }


def test_one_greedy_answer_to_one_source_needs_no_table():
    row = {"step": 1} | {f"val/{name}@1": 0.5 for name in ("mean", "acc", "pass", "best")}
    assert validation_table(History([row])) is None
    assert validation_table(History([{"step": 1, "reward/mean": 0.5}])) is None


def test_the_report_shows_the_table_and_draws_sources_but_no_ends_as_lines(run):
    append_rows(run.metrics, [{"step": step, **METRICS} for step in (0, 1)])
    page = write_report(run.path).read_text()
    assert "Validation at step 1" in page
    assert "62.5% ± 2.0" in page
    legend = page[page.index('<ul class="legend">') :].split("</ul>")[0]
    assert [part.split("</span>")[1].strip() for part in legend.split("<li>")[1:]] == [
        "all</li>", "openai/gsm8k</li>", "b</li>"
    ]  # fmt: skip


def test_the_report_draws_one_sources_interval_as_a_band(run, charts_of):
    ends = with_ends("val/mean@1", 0.5, 0.1)
    append_rows(run.metrics, [{"step": step, **ends} for step in range(3)])
    banded, line = (
        write_report(run.path).read_text(),
        charts_of(run)["Validation score"]["lines"][0],
    )
    run.metrics.write_text("")
    append_rows(run.metrics, [{"step": step, "val/mean@1": 0.5} for step in range(3)])
    plain = charts_of(run)["Validation score"]["lines"][0]
    assert "Validation score" in banded
    assert "Validation accuracy" not in banded
    assert "0.500 ± 0.1" in banded
    assert "low" in line
    assert "low" not in plain


def test_the_score_is_drawn_unless_every_validation_told_an_accuracy(run):
    rows = [{"step": step, "val/mean@1": 0.25, "val/acc@1": 0.5} for step in (1, 2)]
    append_rows(run.metrics, rows)
    page = write_report(run.path).read_text()
    assert "Validation accuracy" in page
    assert "Validation score" not in page
    append_rows(run.metrics, [{"step": 0, "val/mean@1": 0.125}])
    page = write_report(run.path).read_text()
    assert "Validation accuracy" in page
    title = page.index("Validation score</")
    assert "0.250" in page[title : page.index('class="plot"', title)]


def test_the_chart_follows_the_metric_of_the_summary(run):
    append_rows(run.metrics, [{"step": 0, "val/mean@1": 0.5}, {"step": 1, "val/mean@4": 0.75}])
    assert "Validation score</" in write_report(run.path).read_text()
    run.write_json("summary.json", {"accuracy_metric": "val/mean@4"})
    page = write_report(run.path).read_text()
    assert "Validation mean@4</" in page
    assert "Validation score</" not in page
