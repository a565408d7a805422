"""Runs seen from outside: lists with figures and causes, comparisons, `watch` from another process, data frames."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from dovetail.errors import DovetailError, RunDirectoryError
from dovetail.run.run import train
from dovetail.telemetry import RunDirectory
from dovetail.telemetry.jsonl import append_rows

RECORDED = Path(__file__).parents[2] / "plugins" / "diagnosis" / "tests" / "recorded"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs by the metrics that real ones wrote: one collapsed, one learned its rows by heart, three are well."""
    folder = tmp_path_factory.mktemp("seen") / "runs"
    figures = {
        "grpo_collapse": {"reward/mean": "up"},
        "grpo_healthy": {"reward/mean": "up"},
        "sft_overfit": {"actor/loss": "down", "val/loss": "down"},
        "sft_healthy": {"actor/loss": "down", "val/loss": "down"},
        "dpo_healthy": {"actor/accuracy": "up", "val/accuracy": "up"},
    }
    for number, (name, named) in enumerate(figures.items()):
        run = RunDirectory.create(folder / "p" / name)
        shutil.copy(RECORDED / f"{name}.jsonl", run.metrics)
        run.write_json("plan.json", {"counts": {"steps": "160"}, "key_figures": named})
        run.write_json("summary.json", {"status": "completed"})
        lr = "2.0e-2" if name == "grpo_collapse" else "3.0e-4"
        run.write_text(
            "config.yaml", f"seed: {number}\nactor: {{optim: {{lr: {lr}}}}}\nproject: p\n"
        )
    return folder


def test_the_list_says_which_runs_went_wrong_and_why(
    folder: Path, inside: Callable[..., Result]
) -> None:
    rows = json.loads(inside("runs", "list", str(folder), "--json").output)
    causes = {Path(r["path"]).name: [w["name"] for w in r["warnings"]] for r in rows}
    assert causes.pop("grpo_collapse") == ["collapsed", "kl"]
    assert causes.pop("sft_overfit") == ["overfits"]
    assert causes == {name: [] for name in ("grpo_healthy", "sft_healthy", "dpo_healthy")}
    shown = inside("runs", "list", str(folder)).output
    [collapsed] = [line for line in shown.splitlines() if "grpo_collapse" in line]
    assert "acc@1 23.8% → 0.0%" in collapsed
    assert "collapsed since step 4: actor.optim.lr" in collapsed
    [overfit] = [line for line in shown.splitlines() if "sft_overfit" in line]
    assert "loss 4.846 → 1.286" in overfit


def test_a_comparison_shows_differences_and_curves_on_one_page(
    folder: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    runs = [str(folder / "p" / name) for name in ("grpo_collapse", "grpo_healthy")]
    out = tmp_path / "<page>.html"
    done = inside("runs", "compare", *runs, "--out", str(out))
    assert [line.split() for line in done.output.splitlines() if "actor.optim.lr  " in line] == [
        ["actor.optim.lr", "0.02", "0.0003"]
    ]
    page = out.read_text()
    chart = page[page.index("<h3>val/acc@1</h3>") :].partition("</svg>")[0]
    assert chart.count("<polyline") == 2
    assert "http" not in page.replace("http-equiv", "")
    data = json.loads(inside("runs", "compare", *runs, "--out", str(out), "--json").output)
    assert data["differences"] == {"seed": [0, 1], "actor.optim.lr": [0.02, 0.0003]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("runs", "compare", "{run}"), "two or more"),
        (("runs", "compare", "{run}", "{run}", "--out", "/nowhere/a.html"), "/nowhere"),
        (("runs", "compare", "{run}", "/nowhere"), "no run directory '/nowhere'"),
        (("watch", "/nowhere"), "the folder '/nowhere' does not exist"),
        (("watch", "{empty}"), "no run"),
    ],
)
def test_what_can_not_be_shown_is_an_error_of_one_line(
    folder: Path, tmp_path: Path, inside: Callable[..., Result], arguments: list[str], said: str
) -> None:
    run = str(folder / "p" / "grpo_healthy")
    done = inside(*(a.format(run=run, empty=tmp_path) for a in arguments), check=False)
    assert done.exit_code != 0
    assert said in done.output


def test_a_run_is_watched_from_another_process_while_it_writes(
    folder: Path, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "p" / "watched")
    rows = [
        json.loads(line) for line in (RECORDED / "grpo_collapse.jsonl").read_text().splitlines()
    ]
    run.write_json("plan.json", {"counts": {"steps": "24"}, "key_figures": {"reward/mean": "up"}})
    append_rows(run.metrics, rows[:3])
    with run.held():
        process = watching(run.path)
        assert process.stdout is not None
        first = process.stdout.readline()
        append_rows(run.metrics, rows[3:])
        run.write_json("summary.json", {"status": "completed", "steps": 24, "total_steps": 24})
    printed, warned = process.communicate(timeout=60)
    assert first.startswith("step 0/24  accuracy 23.8%")
    assert "step 24/24" in printed
    assert "completed" in printed
    assert "fell from 0.238 at step 0 to 0" in warned
    assert process.returncode == 0


def watching(path: Path) -> subprocess.Popen[str]:
    """`dovetail watch` in a process of its own."""
    command = [sys.executable, "-m", "dovetail", "watch", str(path), "--every", "0.1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_twenty_thousand_steps_the_last_are_shown(
    tmp_path: Path, inside: Callable[..., Result]
) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "p" / "long")
    run.write_json(
        "plan.json", {"counts": {"steps": "20,000"}, "key_figures": {"actor/loss": "down"}}
    )
    run.write_json("summary.json", {"status": "completed"})
    append_rows(run.metrics, ({"step": n, "actor/loss": 1 / n} for n in range(1, 20_001)))
    shown = inside("watch", str(run.path)).stdout.splitlines()
    assert "19,980 earlier" in shown[0]
    steps = [line.split()[1] for line in shown if line.startswith("step ")]
    assert steps == [f"{n}/20000" for n in range(19_981, 20_001)]


@pytest.mark.parametrize("what", ["a run", "a folder of runs"])
def test_a_watched_folder_that_vanishes_is_an_error_that_names_it(
    tmp_path: Path, what: str
) -> None:
    runs = tmp_path / "runs"
    run = RunDirectory.create(runs / "p" / "e")
    append_rows(run.metrics, [{"step": 1, "reward/mean": 0.5}])
    watched = run.path if what == "a run" else runs
    with run.held():
        process = watching(watched)
        assert process.stdout is not None
        process.stdout.readline()
        shutil.rmtree(runs)
        _, said = process.communicate(timeout=60)
    assert process.returncode == RunDirectoryError.exit_code
    assert f"'{watched}'" in said
    assert "Traceback" not in said


def test_the_next_run_of_a_folder_is_followed_too(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = None
    for name in ("first", "second"):
        run = RunDirectory.create(runs / "p" / name)
        with run.held():
            append_rows(run.metrics, [{"step": 1, "reward/mean": 0.5}])
            if process is None:
                process = watching(runs)
                assert process.stdout is not None
                process.stdout.readline()
            time.sleep(0.5)  # several looks
            run.write_json("summary.json", {"status": "completed"})
        time.sleep(0.5)
    assert process is not None
    shown, _ = process.communicate(timeout=60)
    last = shown[shown.rindex("RUN ") :].splitlines()[1:]
    assert {tuple(row.split()[:2]) for row in last} == {
        (str(runs / "p" / name), "completed") for name in ("first", "second")
    }
    assert process.returncode == 0


def test_a_watched_folder_shows_its_runs(folder: Path, inside: Callable[..., Result]) -> None:
    shown = inside("watch", str(folder)).output
    assert len(shown.splitlines()) == 6
    torn = folder / "p" / "grpo_healthy" / "metrics.jsonl"
    whole = torn.read_bytes()
    try:
        torn.write_bytes(whole[:-20] + b'\n[1]\n{"step": 1e400}\n{"step": 31, "reward/mean": 1e30')
        assert inside("watch", str(torn.parent)).exit_code == 0
    finally:
        torn.write_bytes(whole)


@pytest.mark.parametrize(
    "text", ["", "[1]", "7", '{"counts": [1], "key_figures": [1], "status": 7', "\x00\xff"]
)
@pytest.mark.parametrize(
    "name", ["plan.json", "summary.json", "run.json", "config.yaml", "metrics.jsonl"]
)
def test_a_damaged_file_hides_neither_its_run_nor_the_others(
    folder: Path, tmp_path: Path, inside: Callable[..., Result], name: str, text: str
) -> None:
    runs = tmp_path / "runs"
    for run in ("grpo_collapse", "grpo_healthy"):
        shutil.copytree(folder / "p" / run, runs / run)
    damaged = runs / "grpo_healthy"
    (damaged / name).write_text(text, encoding="latin-1")
    rows = json.loads(inside("runs", "list", str(runs), "--json").stdout)
    assert {Path(row["path"]).name for row in rows} == {"grpo_collapse", "grpo_healthy"}
    if name != "metrics.jsonl":
        assert "step 30" in inside("watch", str(damaged), "--once").stdout
    assert (inside("report", str(damaged)).exit_code, (damaged / "report.html").is_file()) == (
        0,
        True,
    )


def test_a_run_is_read_as_data_frames(config: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    from dovetail_diagnosis import load

    path = train(config)["directory"]
    run = load(path)
    assert run.metrics.index.tolist() == [0, 1, 2, 3]
    logged = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in logged if "reward/mean" in row]
    assert run.metrics["reward/mean"].dropna().tolist() == rewards
    assert (
        run.metrics.loc[3, "val/mean@1"]
        == [row for row in logged if "val/mean@1" in row][-1]["val/mean@1"]
    )
    assert set(run.samples["step"]) == {0, 1, 2, 3}
    assert run.samples.query("file == 'step'")["score"].notna().all()
    assert run.config["actor"]["optim"]["lr"] == 1e-2
    assert run.summary["status"] == "completed"
    with pytest.raises(RunDirectoryError):
        load(Path(path).parent)


def test_without_pandas_the_error_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail_diagnosis import load

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DovetailError) as caught:
        load(folder / "p" / "grpo_healthy")
    assert "pip install pandas" in str(caught.value.hint)
