"""Runs on preference pairs: what is validated on held-out pairs is what transformers computes, and it improves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.run.run import train

BETA = 0.3


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as JSON lines; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(numbers: range) -> list[dict[str, Any]]:
    """Sums, which are to be answered gladly."""
    return [
        {"prompt": f"{a} + {b}?", "chosen": f"{a + b}, gladly", "rejected": f"{a + b}, no"}
        for a in numbers
        for b in range(4)
    ]


@pytest.fixture
def document(tiny: Path, tmp_path: Path) -> dict[str, Any]:
    """A config of six steps of eight pairs, with twelve held out."""
    return {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": write(tmp_path / "train.jsonl", pairs(range(4))),
            "val_files": write(tmp_path / "held_out.jsonl", pairs(range(5, 8))),
            "train_batch_size": 8,
            "max_prompt_length": 64,
            "max_response_length": 32,
        },
        "actor": {"objective": {"name": "dpo", "beta": BETA}, "optim": {"lr": 1e-2}},
        "trainer": {
            "name": "supervised",
            "examples": "preferences",
            "total_epochs": 3,
            "validate_every": 3,
            "best_metric": "val/accuracy",
        },
        "tracking": ["jsonl"],
    }


def run(document: dict[str, Any], *overrides: str) -> tuple[Path, list[dict[str, float]]]:
    """Train; the directory of the run and its metrics."""
    config = Path(document["output_dir"]).parent / "config.yaml"
    config.write_text(yaml.safe_dump(document))
    directory = Path(train(config, list(overrides))["directory"])
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return directory, [json.loads(line) for line in lines]


def log_prob(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """Of a whole answer with its end of turn, by transformers."""
    turns = [{"role": "user", "content": prompt}]
    start = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turns.append({"role": "assistant", "content": answer})
    text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip()
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    before = len(tokenizer(start, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, ids[0, 1:, None])[before - 1 :].sum().item()


@pytest.mark.parametrize(
    "engine",
    ["fsdp2", pytest.param({"name": "fsdp2", "lora": {"rank": 4}}, marks=pytest.mark.nightly)],
)
def test_dpo_is_validated_on_held_out_pairs_against_its_reference(
    document: dict[str, Any], tiny: Path, engine: Any
) -> None:
    """By a frozen model, or by the policy with its adapter off."""
    document["actor"]["engine"] = engine
    directory, rows = run(document)
    found = {row["step"]: row for row in rows if "val/loss" in row}
    assert sorted(found) == [0, 3, 6]
    assert found[0]["val/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert found[0]["val/margin"] == pytest.approx(0, abs=1e-5)
    assert found[6]["val/accuracy"] == 1.0
    assert found[6]["val/loss"] < 0.7 * np.log(2)

    best = json.loads((directory / "summary.json").read_text())["best"]["step"]
    assert best == next(step for step, row in found.items() if row["val/accuracy"] == 1.0)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (directory / "final", tiny)
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    margins = []
    for pair in pairs(range(5, 8)):
        chosen, rejected = (
            log_prob(policy, tokenizer, pair["prompt"], pair[side])
            - log_prob(reference, tokenizer, pair["prompt"], pair[side])
            for side in ("chosen", "rejected")
        )
        margins.append(BETA * (chosen - rejected))
    assert found[6]["val/margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    expected = np.logaddexp(0, -np.array(margins)).mean()
    assert found[6]["val/loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.nightly
def test_kto_trains_on_responses_that_were_rated_alone(
    document: dict[str, Any], tmp_path: Path
) -> None:
    """Their mismatched responses are scored in the step, and on held-out rows."""
    for name, numbers in (("train", range(4)), ("held_out", range(5, 8))):
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in pairs(numbers)
            for side in ("chosen", "rejected")
        ]
        write(tmp_path / f"{name}.jsonl", rows)
    document["trainer"]["examples"] = "unpaired_preferences"
    document["data"]["train_batch_size"] = 16
    document["actor"] |= {"objective": {"name": "kto", "beta": 1.0}, "optim": {"lr": 1e-2}}
    directory, rows = run(document)
    found = {row["step"]: row for row in rows if "val/loss" in row}
    assert found[0]["val/loss"] == pytest.approx(0.5, abs=1e-5)
    assert found[0]["val/divergence"] == pytest.approx(0, abs=1e-5)
    assert found[6]["val/accuracy"] > 0.7
    assert found[6]["val/loss"] < 0.4
    assert found[6]["val/desirable_reward"] > found[6]["val/undesirable_reward"]
    assert any(row.get("actor/divergence", 0) > 0 for row in rows)
    shown = json.loads((directory / "samples" / "step_1.jsonl").read_text().splitlines()[0])
    assert shown["desirable"] == ("gladly" in shown["response"])


@pytest.mark.parametrize("cut", [0, 0.5], ids=["garbage", "half"])
def test_columns_of_the_reference_that_can_not_be_read_are_computed_anew(
    document: dict[str, Any], cut: float
) -> None:
    document["trainer"] |= {"save_every": 1, "validate_every": 0, "best_metric": None}
    directory, _ = run(document, "trainer.total_steps=3")
    (kept,) = (directory / "constant_columns").glob("score_ref_*.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: int(len(whole) * cut)] or b"\xff" * 100)
    assert run(document, "trainer.total_steps=4")[1][-1]["step"] == 4
    expected = load(whole)
    assert all((expected[name] == found).all() for name, found in load_file(kept).items())


@pytest.mark.nightly
def test_the_reference_is_computed_once_and_closed_and_a_resumed_run_reads_it(
    document: dict[str, Any], moves: list[tuple[str, str]]
) -> None:
    """A resumed run ends with the bits of one in one go, also where its reference leaves the accelerator, which it does once."""
    document["trainer"] |= {"save_every": 3, "validate_every": 0, "best_metric": None}
    whole, rows = run(document, "experiment=whole")
    assert not [row for row in rows[1:] if "time/score_ref" in row and row["step"] > 1]
    (kept,) = (whole / "constant_columns").glob("score_ref_*.safetensors")
    assert len(load_file(kept)["keys"]) == 2 * (16 + 12)
    events = (whole / "events.jsonl").read_text()
    assert "role ref" in events

    document["ref"] = {"offload": True}
    half, _ = run(document, "experiment=half", "trainer.total_steps=3")
    assert moves == [("ref", "away")]
    times = [path.stat().st_mtime_ns for path in (half / "constant_columns").iterdir()]
    run(document, "experiment=half", "trainer.total_steps=6")
    assert [path.stat().st_mtime_ns for path in (half / "constant_columns").iterdir()] == times

    # A single epoch sees every example once: nothing is kept.
    document["data"]["train_batch_size"] = 16
    once, _ = run(document, "experiment=once", "trainer.total_epochs=1")
    assert not (once / "constant_columns").exists()
    expected, found = (load_file(path / "final" / "model.safetensors") for path in (whole, half))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
