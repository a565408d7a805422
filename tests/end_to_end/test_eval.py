"""`dovetail eval` reports what the run's own validation does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from dovetail.run.run import train
from dovetail.telemetry.jsonl import read_rows

SAMPLED = (
    "rollout.validation.n=4",
    "rollout.validation.temperature=1.0",
    "rollout.validation.pass_threshold=0.1",
)


def validated(run: Path, step: int) -> dict[str, float]:
    """What the run logged of its validation after a step."""
    rows = [r for r in read_rows(run / "metrics.jsonl") if r["step"] == step]
    return {name: v for row in rows for name, v in row.items() if name.startswith("val/")}


def test_every_checkpoint_has_the_metrics_of_the_runs_validation(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    train(config, [*SAMPLED, "trainer.validate_every=1"])
    run = tmp_path / "runs" / "tests" / "run"
    out, samples = tmp_path / "curve.jsonl", tmp_path / "samples.jsonl"
    done = inside(
        "eval", f"{run}@all", f"{run}/final", "--out", str(out), "--samples", str(samples)
    )
    curve = read_rows(out)
    assert [row["step"] for row in curve] == [1, 2, 3, None]
    for row in curve[:3]:
        assert row["metrics"] == validated(run, row["step"])
    assert curve[3]["metrics"] == curve[2]["metrics"]
    assert curve[0]["metrics"] != curve[2]["metrics"]
    assert all(name in done.output for name in ("mean@4", "pass@2", f"{run}@2"))
    assert len(read_rows(samples)) == 4 * 4 * 4


def test_a_runs_name_may_hold_what_separates_arguments(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    train(config, ["experiment=lr=1@2", "trainer.total_steps=1"])
    run = tmp_path / "runs" / "tests" / "lr=1@2"
    done = inside("eval", f"{run}@1", str(run), "data.val_batch_size=2", "--json")
    assert [row["metrics"] for row in json.loads(done.output)] == [validated(run, 1)] * 2


def test_a_run_alone_is_its_latest_checkpoint_with_its_config(
    finished: Path, inside: Callable[..., Result]
) -> None:
    [row] = json.loads(inside("eval", str(finished), "--json").output)
    assert row["step"] == 3
    assert row["metrics"] == validated(finished, 3)


def test_a_checkpoint_of_another_run_keeps_its_own_tokenizer(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    """Its prompts go through the chat template of its own run, its rewards and data are the first's."""
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    train(config, ["trainer.total_steps=1"])
    other = [f"model.chat_template={json.dumps(template)}", "experiment=other"]
    train(config, [*other, "trainer.total_steps=1"])
    runs = tmp_path / "runs" / "tests"
    rows = json.loads(inside("eval", str(runs / "run"), str(runs / "other"), "--json").output)
    assert [row["metrics"] for row in rows] == [validated(runs / n, 1) for n in ("run", "other")]


def test_other_prompts_and_the_untrained_model(
    config: Path, tiny: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    files = f"data.val_files={tmp_path / 'train.jsonl'}"
    samples = tmp_path / "samples.jsonl"
    inside("eval", str(tiny), "--config", str(config), files, "--samples", str(samples))
    assert len(read_rows(samples)) == 12


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("{tmp}",), "run directory"),
        (("{tmp}/nothing/at/all",), "run directory"),
        (("{run}@7",), "checkpoint of step 7; it has: step_1, step_2, step_3"),
        (("{run}@last",), "after the @"),
        (("{run}@best",), "no best checkpoint"),
        (("{tiny}",), "--config"),
        (("{run}", "data.val_files=[]"), "data.val_files is empty"),
        (("{run}", "rollout.name=vlm"), "vlm"),
        (("{run}", "data.max_response_length=100000"), "positions"),
        (("no-such/model", "--config={config}"), "from the hub under this id"),
        (("rollout.validation.n=2",), "at least one MODEL"),
    ],
)
def test_what_can_not_be_evaluated_is_one_error(
    config: Path,
    finished: Path,
    tiny: Path,
    tmp_path: Path,
    inside: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    problem: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    places = {"tmp": tmp_path, "run": finished, "tiny": tiny, "config": config}
    done = inside("eval", *(a.format(**places) for a in arguments), check=False)
    assert done.exit_code in (1, 2)
    assert problem in done.output
    assert "Traceback" not in done.output


def test_a_run_without_checkpoints_names_its_exported_model(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    train(config, ["trainer.save_every=0", "trainer.save_last=false", "trainer.total_steps=1"])
    run = tmp_path / "runs" / "tests" / "run"
    done = inside("eval", str(run), check=False)
    assert done.exit_code == 1
    assert "holds no checkpoint" in done.output
    assert str(run / "final") in done.output
    assert inside("eval", str(run / "final")).exit_code == 0
