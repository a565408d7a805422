"""SFT and DPO show what they minimise, in training and held out: on the console, in the summary and first in the report."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.run.run import train


def rows(numbers: range, *answers: str) -> list[dict[str, Any]]:
    """Sums with these answers, such as `chosen` and `rejected`."""
    texts = {"response": "{}", "chosen": "{}, gladly", "rejected": "{}, no"}
    return [
        {"prompt": f"{a} + {b}?", **{name: texts[name].format(a + b) for name in answers}}
        for a in numbers
        for b in range(4)
    ]


@pytest.mark.usefixtures("report")
@pytest.mark.parametrize(
    ("objective", "answers", "figures"),
    [
        ("nll", ("response",), {"loss": "down"}),
        ("dpo", ("chosen", "rejected"), {"loss": "down", "accuracy": "up", "margin": "up"}),
    ],
)
def test_a_run_on_examples_shows_its_key_figures(
    tiny: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    objective: str,
    answers: tuple[str, ...],
    figures: dict[str, str],
) -> None:
    for name, part in (("train", range(4)), ("val", range(5, 7))):
        text = "".join(json.dumps(row) + "\n" for row in rows(part, *answers))
        (tmp_path / f"{name}.jsonl").write_text(text)
    examples = "preferences" if "chosen" in answers else "conversations"
    document = {
        "output_dir": str(tmp_path / "runs"),
        "experiment": objective,
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": str(tmp_path / "train.jsonl"),
            "val_files": str(tmp_path / "val.jsonl"),
            "train_batch_size": 8,
            "max_prompt_length": 64,
            "max_response_length": 32,
        },
        "actor": {"objective": objective, "optim": {"lr": 1e-2}},
        "trainer": {"name": "supervised", "examples": examples, "total_epochs": 2},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    summary = train(config)
    run = Path(summary["directory"])
    expected = {f"{part}/{name}": b for part in ("actor", "val") for name, b in figures.items()}
    assert json.loads((run / "plan.json").read_text())["key_figures"] == expected
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, better in expected.items():
        values = [row[name] for row in logged if name in row]
        ends = summary["key_figures"][name]
        assert ends["better"] == better
        if name.startswith("val/"):
            assert (ends["before"], ends["after"]) == (values[0], values[-1])
    printed = capfd.readouterr().out
    for name in figures:
        assert re.search(rf"^step 0/4 .*\bval_{name} ", printed, re.MULTILINE)
        assert re.search(rf"^step 4/4 .*\b{name} .*grad_norm", printed, re.MULTILINE)
        assert re.search(rf"Held-out {name} \(.* is better\) +\S+ → \S+", printed)
    after = printed[printed.index("Next:") :]
    assert "eval" not in after
    assert re.search(r"^Next stage +docs/sft\.md#grpo-from-there$", printed, re.MULTILINE)
    page = unescape((run / "report.html").read_text())
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles[0].startswith("Loss (lower is better)")
    assert any(title.startswith("Held-out loss") for title in titles[: len(expected)])
    assert "Held-out loss (lower is better), before → after" in page
    assert "Mean reward" not in page


def test_a_run_with_rewards_shows_its_reward_and_says_how_to_evaluate(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = train(config)
    assert list(summary["key_figures"]) == ["reward/mean"]
    printed = capfd.readouterr().out
    assert re.search(r"Reward \(higher is better\) +\S+ → \S+", printed)
    run = tmp_path / "runs" / "tests" / "run"
    after = printed[printed.index("Next:") :]
    assert f"eval {run}@all" in after
    assert f"chat {run}/final" in after
    assert "Next stage" not in printed
