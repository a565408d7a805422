"""Runs with images: a policy learns to tell two colours apart, which it can only by looking; and a run on examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from dovetail.run.run import train
from dovetail_datasets import open_image
from dovetail_sdk.testing import square, tiny_vision_model


def write_config(directory: Path) -> Path:
    """Red asks for a token whose first letter has an even number, blue for an odd one: half of all guesses are right."""
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>Which colour?"}],
            "images": [{"bytes": square(colour, 28 + 28 * (i % 3), 56), "path": None}],
            "reward_model": {"ground_truth": name},
        }
        for i in range(8)
        for name, colour in (("red", (230 - i, 20 + i, 20)), ("blue", (20, 20 + i, 230 - i)))
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "train.parquet")
    (directory / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    even = ord(solution_str[0]) % 2 == 0 if solution_str else True\n"
        "    return float(even == (ground_truth == 'red'))\n"
    )
    document = {
        "seed": 3,
        "project": "tests",
        "experiment": "run",
        "output_dir": str(directory / "runs"),
        "model": {"path": str(tiny_vision_model(directory / "model")), "dtype": "float32"},
        "data": {
            "train_files": [str(directory / "train.parquet")],
            "train_batch_size": 16,
            "max_prompt_length": 96,
            "max_response_length": 1,
        },
        "rollout": {"name": "hf", "n": 8},
        "actor": {"optim": {"lr": 5e-3}},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo_clip"},
        "reward": {"function": {"path": str(directory / "reward.py")}},
        "trainer": {"total_steps": 16, "save_every": 0, "validate_after": False},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def metrics_of(config: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a run, step by step."""
    train(config, overrides)
    file = config.parent / "runs" / "tests" / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line.get("metrics", line) for line in lines]


def test_the_trainer_looks_as_the_rollout_did(config: Path) -> None:
    metrics = metrics_of(config, "trainer.total_steps=2")
    gaps = [
        line["logprob_check/prob_diff_max"]
        for line in metrics
        if line.get("logprob_check/prob_diff_max")
    ]
    assert gaps
    assert max(gaps) < 1e-5
    assert any(line.get("actor/grad_norm", 0) > 0 for line in metrics)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_policy_learns_to_look(config: Path) -> None:
    metrics = metrics_of(config)
    rewards = [line["reward/mean"] for line in metrics if line.get("reward/mean") is not None]
    assert sum(rewards[:3]) / 3 < 0.65
    assert sum(rewards[-3:]) / 3 > 0.75


@pytest.fixture
def examples(config: Path) -> Path:
    """A config of supervised steps on the same pictures, of which a conversation shows one or two, or none."""
    red, blue = (square(colour, 56, 56) for colour in ((230, 20, 20), (20, 20, 230)))
    rows = []
    for first, second in ((red, blue), (blue, red), (red, None), (None, None)):
        answers = ["red" if picture == red else "blue" for picture in (first, second)]
        messages = [
            {"role": "user", "content": ("<image>" if first else "") + "Which?"},
            {"role": "assistant", "content": answers[0]},
            {"role": "user", "content": ("<image>" if second else "") + "And now?"},
            {"role": "assistant", "content": answers[1]},
        ]
        images = [{"bytes": picture} for picture in (first, second) if picture]
        rows.append({"messages": messages, "images": images})
    pq.write_table(pa.Table.from_pylist(rows), config.parent / "train.parquet")
    document = yaml.safe_load(config.read_text())
    document["data"] |= {
        "val_files": document["data"]["train_files"],
        "train_batch_size": 4,
        "max_response_length": 96,
    }
    document["actor"] |= {"objective": "nll"}
    document["trainer"] = {"name": "supervised", "total_steps": 8, "save_every": 0}
    for section in ("rollout", "algorithm", "reward"):
        del document[section]
    config.write_text(yaml.safe_dump(document))
    return config


def plain_loss(path: str, rows: list[dict[str, Any]]) -> float:
    """Mean −log π of what the assistant writes, by transformers alone: each conversation in one forward pass."""
    tokenizer, processor = (
        AutoTokenizer.from_pretrained(path),
        AutoImageProcessor.from_pretrained(path),
    )
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    pad, losses = tokenizer.convert_tokens_to_ids("<|image_pad|>"), []
    for row in rows:
        ids: list[int] = []
        trained: list[bool] = []
        for turn in row["messages"]:
            # A picture of 56 × 56 pixels has four tokens.
            shown = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"
            said = turn["content"].replace("<image>", shown)
            for text, on in (
                (f"<|im_start|>{turn['role']}\n", False),
                (said + "<|im_end|>", turn["role"] == "assistant"),
                ("\n", False),
            ):
                tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += tokens
                trained += [on] * len(tokens)
        inputs = {}
        if row["images"]:
            pictures = [open_image(image["bytes"], "it") for image in row["images"]]
            inputs = dict(processor(images=pictures, return_tensors="pt"))
            inputs["mm_token_type_ids"] = torch.tensor([[int(i == pad) for i in ids]])
        with torch.no_grad():
            log_pi = model(input_ids=torch.tensor([ids]), **inputs).logits[0].log_softmax(-1)
        losses += [-float(log_pi[i - 1, ids[i]]) for i in range(len(ids)) if trained[i]]
    return float(np.mean(losses))


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_run_on_conversations_with_images_begins_at_the_loss_of_transformers_and_learns_them(
    examples: Path, streaming: bool
) -> None:
    lines = metrics_of(examples, f"data.streaming={str(streaming).lower()}")
    rows = pq.read_table(examples.parent / "train.parquet").to_pylist()
    before = next(line["val/loss"] for line in lines if line.get("val/loss") is not None)
    assert before == pytest.approx(plain_loss(str(examples.parent / "model"), rows), rel=1e-5)
    losses = [line["actor/loss"] for line in lines if line.get("actor/loss") is not None]
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]


def test_preferences_that_differ_by_their_picture_alone_are_learned(examples: Path) -> None:
    colours = {"red": (230, 20, 20), "blue": (20, 20, 230)}
    for name, colour in colours.items():
        (examples.parent / f"{name}.png").write_bytes(square(colour))
    rows = [
        {"prompt": "<image>?", "chosen": a, "rejected": b, "images": [f"{a}.png"]}
        for a, b in (("red", "blue"), ("blue", "red"))
    ]
    file = examples.parent / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = f"data.train_files={file} data.val_files={file} data.train_batch_size=2"
    lines = metrics_of(
        examples, *files.split(), "actor.objective=dpo", "trainer.examples=preferences"
    )
    held_out = [line for line in lines if line.get("val/loss") is not None]
    # The reference, whose log-probabilities are kept by example, sees the same pictures as the policy.
    assert held_out[0]["val/loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert held_out[-1]["val/accuracy"] == 1
