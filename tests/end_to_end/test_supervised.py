"""Runs that train on a dataset's examples: no rollout, no reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from dovetail.errors import ConfigError, DovetailError
from dovetail.run.run import resume, train

OBJECTIVE = '''
from pathlib import Path

from dovetail_algorithms.objectives.nll import NegativeLogLikelihood


class FailsOnce(NegativeLogLikelihood):
    """Fails in the fourth update of the first process."""

    def denominators(self, mini_batch, reduction):
        counted = Path(__file__).with_name("updates")
        done = int(counted.read_text()) if counted.exists() else 0
        counted.write_text(str(done + 1))
        if done == 3:
            raise RuntimeError("the fourth update")
        return super().denominators(mini_batch, reduction)
'''
TRAINER = '''
from dovetail.interfaces import Trainer


class Everything(Trainer):
    """Calls every method of a run; those that are about a rollout do nothing. Its first step fails once."""

    @classmethod
    def examples(cls, config):
        return "conversations"

    def run(self, run):
        run.publish_weights()
        assert run.validate() == {}
        names = []
        try:
            with run.step() as step:
                run.collect(step)
                names = step.experience.batch()["sample_id"]
                raise RuntimeError
        except RuntimeError:
            pass
        while not run.position.finished:
            run.admit()
            with run.step() as step:
                run.collect(step)
                assert not step.experience.samples
                assert set(step.experience.batch()["temperature"]) == {1.0}
                if step.number == 1:
                    assert step.experience.batch()["sample_id"] == names
                run.admit(3)
                run.learn(step)
                run.publish_weights()
            assert run.validate() == {}
        assert run.position.weight_version == 0
'''


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    """A config of seven steps of four conversations, ten in all."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{a} + 1 ="},
                {"role": "assistant", "content": str(a + 1)},
                {"role": "user", "content": "and one more?"},
                {"role": "assistant", "content": str(a + 2)},
            ]
        }
        for a in range(10)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "fails_once.py").write_text(OBJECTIVE)
    (tmp_path / "everything.py").write_text(TRAINER)
    document = {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": str(tmp_path / "train.jsonl"),
            "train_batch_size": 4,
            "max_prompt_length": 64,
            "max_response_length": 64,
        },
        "actor": {
            "objective": "nll",
            "optim": {"lr": 1e-2},
        },
        "trainer": {"name": "supervised", "total_epochs": 3, "samples_per_step": -1},
        "tracking": ["jsonl"],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, np.ndarray]:
    """Weights and moments in the checkpoint of the last step."""
    folder = run / "checkpoints" / "step_7"
    return {
        f"{file.relative_to(folder)}/{name}": value
        for file in sorted(folder.glob("**/*.safetensors"))
        for name, value in load_file(file).items()
    }


def used(run: Path) -> list[tuple[int, int]]:
    """Epoch and row of every example, in order."""
    names = [
        json.loads(line)["sample_id"]
        for step in range(1, 8)
        for line in (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()
    ]
    parts = [name.split(".") for name in names]
    return [(int(epoch[1:]), int(row[1:])) for _, epoch, row, _, _ in parts]


@pytest.mark.usefixtures("report")
def test_it_learns_the_conversations_and_writes_its_files(
    config: Path, inside: Callable[..., Any]
) -> None:
    summary = train(config)
    assert (summary["status"], summary["steps"]) == ("completed", 7)
    run = Path(summary["directory"])
    rows = [row for row in metrics(run) if "actor/loss" in row]
    assert rows[-1]["actor/loss"] < 0.6 * rows[0]["actor/loss"]
    assert not [name for name in rows[0] if name.startswith(("reward/", "val/", "time/rollout"))]
    lock = json.loads((run / "plugins.lock.json").read_text())
    kinds = {entry["kind"] for entry in lock["plugins"]}
    assert not kinds & {"rollout", "weight_transport", "reward_manager"}
    page = (run / "report.html").read_text().partition("</head>")[2].partition("<pre")[0]
    assert "Loss" in page
    assert not [text for text in ("Reward", "score none", "Entropy") if text in page]
    sample = json.loads((run / "samples" / "step_1.jsonl").read_text().splitlines()[0])
    assert sample["prompt"][-1]["content"].endswith("+ 1 =")
    assert sample["response"].endswith("<|im_end|>")


def test_every_example_is_trained_on_once_an_epoch(config: Path) -> None:
    """A step runs on across the end of an epoch."""
    found = used(Path(train(config)["directory"]))
    assert len(found) == 28
    assert len(set(found)) == 28
    for epoch in (0, 1):
        assert sorted(row for e, row in found if e == epoch) == list(range(10))


def test_held_out_loss_is_that_of_transformers_and_the_best_step_is_exported(
    config: Path, inside: Callable[..., Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    held_out = config.with_name("val.jsonl")
    rows = [json.loads(line) for line in config.with_name("train.jsonl").read_text().splitlines()]
    rows = [{"messages": row["messages"][: 2 + 2 * (i % 2)]} for i, row in enumerate(rows[:5])]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    inside(
        *("sft", str(config), f"data.val_files={held_out}", "trainer.validate_every=2"),
        *("trainer.best_metric=val/loss", "trainer.export=best", "experiment=sft"),
    )
    run = config.parent / "runs" / "dovetail" / "sft"
    found = {row["step"]: row for row in metrics(run) if "val/loss" in row}
    assert sorted(found) == [0, 2, 4, 6, 7]
    assert found[7]["val/loss"] < 0.6 * found[0]["val/loss"]
    for row in found.values():
        assert row["val/perplexity"] == pytest.approx(np.exp(row["val/loss"]), rel=1e-6)
    best = min(found, key=lambda step: found[step]["val/loss"])
    assert json.loads((run / "summary.json").read_text())["best"]["step"] == best
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    total = tokens = 0
    start = "<|im_start|>assistant\n"
    for row in rows:
        before, *answers = tokenizer.apply_chat_template(row["messages"], tokenize=False).split(
            start
        )
        pieces = [(before, False)]
        for answer in answers:
            said, _, rest = answer.partition("<|im_end|>")
            pieces += [(start, False), (f"{said}<|im_end|>", True), (rest, False)]
        ids, labels = [], []
        for piece, trained in pieces:
            piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
            ids += piece_ids
            labels += piece_ids if trained else [-100] * len(piece_ids)
        count = sum(label != -100 for label in labels)
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]))
        total, tokens = total + float(out.loss) * count, tokens + count
    assert found[best]["val/loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_run_that_failed_goes_on_to_the_same_bits(config: Path, streaming: str) -> None:
    data = [f"data.streaming={streaming}", "data.shuffle_window=3"]
    whole = Path(train(config, ["experiment=whole", *data])["directory"])
    failing = [
        "experiment=fails",
        *data,
        f"actor.objective={{path: {config.with_name('fails_once.py')}, attribute: FailsOnce}}",
        "trainer.save_every=2",
    ]
    with pytest.raises((DovetailError, RuntimeError), match="the fourth update"):
        train(config, failing)
    run = whole.with_name("fails")
    assert (run / "checkpoints" / "step_2").is_dir()
    resume(run)
    assert used(run) == used(whole)
    expected, found = weights(whole), weights(run)
    assert expected
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)


def test_a_mixture_logs_what_a_step_had_from_each_dataset(config: Path) -> None:
    lines = config.with_name("train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("few", lines[:2]), ("many", lines[2:])):
        config.with_name(f"{name}.jsonl").write_text("".join(part))
    mixture = ", ".join(
        f"{name}: {{files: {config.with_name(name)}.jsonl, weight: {weight}}}"
        for name, weight in (("few", 3), ("many", 2))
    )
    done = train(config, ["data.train_files=[]", f"data.mixture={{{mixture}}}"])
    rows = [row for row in metrics(Path(done["directory"])) if "data/few/prompt_share" in row]
    assert len(rows) == done["steps"] == 7
    assert all(
        row["data/few/prompt_share"] + row["data/many/prompt_share"] == pytest.approx(1)
        for row in rows
    )
    # Of the first twenty examples, which are two epochs, twelve are from the file of two rows.
    assert sum(row["data/few/prompt_share"] for row in rows[:5]) / 5 == pytest.approx(0.6)


def test_a_trainer_from_a_file_may_call_everything_and_gets_the_examples_of_a_failed_step_again(
    config: Path,
) -> None:
    everything = f"trainer={{path: {config.with_name('everything.py')}, attribute: Everything}}"
    summary = train(config, [everything, "trainer.total_steps=2"])
    assert (summary["status"], summary["steps"]) == ("completed", 2)


def test_a_reward_that_nothing_would_call_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="reward"):
        train(config, reward=lambda **_: 1.0)
