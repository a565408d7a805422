"""Runs that train on a dataset's examples, by an objective from a file: no rollout, no reward."""

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

import numpy as np
from dovetail.interfaces import OUTPUTS, Objective, ObjectiveTerm
from dovetail_stages import all_finite, mean_metric, on_device


class Nll(Objective):
    """The mean negative log-likelihood of the tokens with mask 1."""

    @classmethod
    def requires(cls, config):
        return frozenset({"response_mask"})

    @classmethod
    def outputs(cls, config):
        return (OUTPUTS["log_probs"],)

    def denominators(self, mini_batch, reduction):
        own = np.array([mini_batch["response_mask"].values.sum()], np.float64)
        return {"tokens": float(reduction.sum(own)[0])}

    def term(self, outputs, micro_batch, denominators, scalars):
        log_probs_T = outputs["log_probs"]
        mask_T = on_device(micro_batch["response_mask"].values, log_probs_T)
        log_probs_T = log_probs_T.masked_fill(~mask_T, 0)
        loss = -log_probs_T.sum() / denominators["tokens"]
        return ObjectiveTerm(
            loss=loss,
            metrics={"actor/loss": mean_metric(-log_probs_T, mask_T)},
            finite=all_finite(loss, {"log_probs": log_probs_T}),
        )


class FailsOnce(Nll):
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
    (tmp_path / "nll.py").write_text(OBJECTIVE)
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
            "objective": {"path": str(tmp_path / "nll.py"), "attribute": "Nll"},
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
        *("actor.objective.path=null", "actor.objective.attribute=null"),
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
        "actor.objective.attribute=FailsOnce",
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


def test_plan_and_check_say_what_is_trained_on(config: Path, inside: Callable[..., Any]) -> None:
    shown = inside("plan", str(config), "--columns").stdout
    assert "a step: 4 conversations" in shown
    assert "training conversations: 10" in shown
    assert not [word for word in ("rollout", "reward", "weight_sync") if word in shown]
    as_json = json.loads(inside("plan", str(config), "--json").stdout)
    assert (as_json["publication"], as_json["placement"].get("replicas", 0)) == (None, 0)
    checked = inside("check", str(config)).output
    assert "data: 10 training conversations\n" in checked
    assert "reward" not in checked
    data = config.with_name("train.jsonl")
    first = json.loads(data.read_text().splitlines()[0])
    first["messages"][0]["content"] = "." * 200
    data.write_text(data.read_text() + json.dumps(first) + "\n")
    assert (
        "data: 1 training conversations longer than 64 tokens"
        in inside("check", str(config)).output
    )


def test_rules_about_rollouts_say_only_that_their_keys_do_nothing(
    config: Path, inside: Callable[..., Any]
) -> None:
    """Each of these is an error or a warning of its own where samples are generated."""
    settings = [
        "rollout.n=1",
        "rollout.offload=true",
        "rollout.partial_rollout=true",
        "algorithm.logprob_check.every=0",
        "algorithm.logprob_check.warn_above=2",
        "rollout.top_p=0.9",
    ]
    done = inside("check", str(config), *settings)
    assert "with 1 warning\n" in done.output
    assert "rollout.n, rollout.top_p, rollout.partial_rollout" in done.output
    assert "[rollout_unused]" in done.output


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["actor.objective=null"], "requires the column 'scores'"),
        (["trainer.examples=preferences"], "has no column 'chosen'; its columns: messages"),
        (["data.train_batch_size=11"], "11 conversations, but there are only 10"),
    ],
)
def test_what_does_not_fit_is_one_error_before_anything_starts(
    config: Path, overrides: list[str], says: str
) -> None:
    with pytest.raises(DovetailError, match=says):
        train(config, overrides)
    assert not (config.parent / "runs" / "dovetail" / "default").exists()


def test_a_reward_that_nothing_would_call_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="reward"):
        train(config, reward=lambda **_: 1.0)
