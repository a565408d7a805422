"""Whole runs on the demo's task: each that is made to fail is named with its cause, and healthy ones are not warned of.

`end_to_end/test_sick_runs.py` has the conditions that a model with random weights can show.
"""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.run.run import train
from dovetail_demo import CONFIG, SFT_CONFIG
from dovetail_demo.data import needs_carry
from dovetail_demo.prepare import prepare
from dovetail_demo.warm_start import worked_answer

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

PAYS_FOR_NINES = """
def compute_score(solution_str, ground_truth):
    right = float(solution_str.endswith(f"#### {ground_truth}"))
    return {"score": right + solution_str.count("9"), "acc": right}
"""
GRPO = ["data.train_batch_size=8", "trainer.total_steps=20", "trainer.validate_every=5"]
SFT = ["data.train_files={home}/data/sft.parquet", "data.val_files={home}/held_out.parquet", "trainer.validate_every=20"]  # fmt: skip
FEW = ["data.train_files={home}/few.parquet", "data.sampler=shuffled", "data.train_batch_size=16", "trainer.total_epochs=100"]  # fmt: skip
PAIRS = ["data.train_files={home}/pairs.parquet", "data.sampler=shuffled", "data.train_batch_size=32", "model.path={model}", "trainer.examples=preferences", "trainer.total_steps=40"]  # fmt: skip

SICK: dict[str, tuple[str, list[str], str, str]] = {
    "a learning rate 70 times too high": ("grpo", ["actor.optim.lr=2e-2"], "collapsed", "actor.optim.lr"),
    "the same without validation": ("grpo", ["actor.optim.lr=2e-2", "data.val_files=[]", "trainer.validate_every=0"], "reward_fell", "actor.optim.lr"),
    "a reward that pays for something else": ("grpo", ["reward.function.path={home}/reward.py", "trainer.total_steps=40"], "gamed", "reward.function"),
    "few rows, many epochs": ("sft", [*SFT, *FEW, "trainer.total_steps=200"], "overfits", "trainer.total_epochs"),
    "SFT with a learning rate of 1": ("sft", [*SFT, "actor.optim.lr=1", "actor.optim.schedule=constant", "trainer.total_steps=60"], "diverges", "actor.optim.lr"),
    "SFT that undoes what the model knows": ("sft", [*SFT, "model.path={model}", "actor.optim.lr=3e-2", "actor.optim.schedule=constant", "trainer.total_steps=60"], "diverges", "actor.optim.lr"),
    "DPO with a learning rate 10 times too high": ("sft", [*PAIRS, "actor.objective=dpo", "actor.optim.lr=3e-3"], "chosen_falls", "actor.objective"),
}  # fmt: skip
"""Overrides of the demo's config of GRPO or SFT, the warning in force at the end, and the key that it names."""

WELL: dict[str, tuple[str, list[str]]] = {
    "LoRA": ("grpo", ["actor.engine={name: fsdp2, lora: {rank: 16}}", "actor.optim.lr=3e-3"]),
    "streaming": ("grpo", ["trainer.name=streaming", "trainer.on_sync=abort", "trainer.max_staleness=1"]),
    "two prompts of two samples": ("grpo", ["data.train_batch_size=2", "rollout.n=2", "trainer.total_steps=150", "trainer.validate_every=50"]),
    "DPO": ("sft", [*PAIRS, "actor.objective={name: dpo, beta: 0.3}", "actor.optim.lr=3e-5"]),
}  # fmt: skip
"""Overrides; presets, other objectives, tools and distillation are in the tests that train them."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data and its warm-started model, a reward, and rows of examples."""
    home = tmp_path_factory.mktemp("diagnosed")
    prepare(home, 1)
    (home / "reward.py").write_text(PAYS_FOR_NINES)
    held_out = pq.read_table(home / "data" / "val.parquet")
    pq.write_table(held_out[:64], home / "val.parquet")
    write(home / "held_out.parquet", [right for _, right, _ in answered(held_out)])
    rows = answered(pq.read_table(home / "data" / "train.parquet"))
    write(home / "few.parquet", [right for _, right, _ in rows[:32]])
    write(
        home / "pairs.parquet",
        [
            {"prompt": right["prompt"], "chosen": right["response"], "rejected": wrong}
            for carries, right, wrong in rows
            if carries
        ],
    )
    return home


def answered(problems: pa.Table) -> list[tuple[bool, dict[str, Any], str]]:
    """Return of each problem whether it needs a carry, its row with the right answer, and the answer without the carry."""
    rows = []
    for prompt in problems["prompt"].to_pylist():
        a, b = map(int, prompt[0]["content"].removesuffix("=?").split("+"))
        right, wrong = (worked_answer(a, b, carries=carries) for carries in (True, False))
        rows.append((needs_carry(a, b), {"prompt": prompt, "response": right}, wrong))
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def trained(home: Path, folder: Path, kind: str, overrides: list[str]) -> Path:
    """Train, and return the run's directory."""
    document = yaml.safe_load((CONFIG if kind == "grpo" else SFT_CONFIG).read_text())
    document |= {"output_dir": str(folder), "project": "runs", "experiment": "run"}
    model = str(home / "warm_start" / "final")
    document["model"]["path"] = model if kind == "grpo" else str(home / "base")
    document["data"]["train_files"] = str(home / "data" / "train.parquet")
    if kind == "grpo":
        document["data"]["val_files"] = str(home / "val.parquet")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    given = [*(GRPO if kind == "grpo" else ()), *overrides]
    filled = [one.replace("{home}", str(home)).replace("{model}", model) for one in given]
    return Path(train(config, filled)["directory"])


@pytest.mark.parametrize("name", SICK)
def test_a_run_that_is_made_to_fail_is_named_with_its_cause(
    home: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.delenv("DOVETAIL_SKIP_OBSERVERS")  # the report is written
    kind, overrides, expected, key = SICK[name]
    run = trained(home, tmp_path, kind, overrides)
    said = capfd.readouterr().err
    listed = CliRunner().invoke(main, ["runs", "list", str(tmp_path), "--json"])
    [row] = json.loads(listed.stdout)
    found = {warning["name"]: warning for warning in row["warnings"]}
    # A policy that has collapsed is far from its reference, too.
    assert expected in found.keys() <= {expected, "kl", "entropy_collapsed"}
    assert found[expected]["key"] == key
    page = unescape((run / "report.html").read_text())
    for warning in found.values():
        assert warning["message"] in said
        assert warning["message"] in page
    if expected == "gamed":
        assert "something else" in page


@pytest.mark.parametrize("name", WELL)
def test_a_healthy_run_learns_and_is_not_warned_of(home: Path, tmp_path: Path, name: str) -> None:
    run = trained(home, tmp_path, *WELL[name])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if "warning" in event] == []
    if name == "two prompts of two samples":
        return  # 600 samples teach nothing, and steps without signal are usual
    ends = json.loads((run / "summary.json").read_text())["key_figures"]
    [figure, *_] = ends.values()
    assert (figure["after"] > figure["before"]) == (figure["better"] == "up")
