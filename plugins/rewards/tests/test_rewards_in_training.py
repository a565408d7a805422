"""Every function and manager in a run: a step of GRPO on a tiny random model, in which all samples get scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dovetail.plugins.index import default_index
from dovetail.run.run import resume, train
from dovetail_rewards.conformance.reward_model import tiny_classifier
from dovetail_rewards.sandbox import available_levels
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_sdk.testing.reward_service import reward_service

GROUP = """
def compute_score(solution_a, solution_b):
    return float(len(solution_a) > len(solution_b))
"""
RULE = """
def compute_score(solution_str, ground_truth):
    return {"score": len(solution_str) / 50, "length": len(solution_str)}
"""
TOKENS = """
def compute_score(solution_str, response_ids):
    return {"token_rewards": [0.1] * len(response_ids)}
"""
DRAWS = """
import torch

def compute_score(solution_str):
    return float(torch.rand(()))
"""
FUNCTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "gsm8k": ({"method": "flexible"}, "18"),
    "math": ({"processes": 1}, "x+1"),
    "dapo_math": ({}, "34"),
    "geometry3k": ({"processes": 1}, "34"),
    "multiple_choice": ({}, "B"),
    "exact_match": ({}, "four"),
    "fuzzy_match": ({}, "four"),
    "json_schema": ({}, {"type": "array"}),
    "regex_format": ({"pattern": ".*"}, ""),
    "instruction_following": ({}, [{"instruction": "punctuation:no_comma"}]),
    "length_penalty": ({"limit": 4}, ""),
    "repetition_penalty": ({}, ""),
    "code": ({}, {"inputs": ["1"], "outputs": ["1"]}),
}
"""Options and a ground truth of each function."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen2 with its tokenizer."""
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=300)


def step(
    tiny: Path,
    place: Path,
    rows: list[Any],
    reward: dict[str, Any],
    held_out: tuple[Any, ...] = (),
    **algorithm: Any,
) -> Any:
    """Return the metrics and samples of the only step of a run."""
    for name, part in (("rows", rows), ("held_out", held_out)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config = {
        "output_dir": str(place / "runs"),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": [str(place / "rows.jsonl")],
            "val_files": [str(place / "held_out.jsonl")] if held_out else [],
            "train_batch_size": len(rows),
            "max_prompt_length": 64,
            "max_response_length": 8,
        },
        "rollout": {"name": "hf", "n": 2},
        "algorithm": {"advantage": "grpo", **algorithm},
        "reward": {"max_failure_share": 0.0, **reward},
        "trainer": {"total_steps": 1, "samples_per_step": -1},
        "tracking": ["jsonl"],
    }
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    summary = train(place / "config.yaml")
    run = Path(summary["directory"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = next(line for line in lines if "reward/failures" in line)
    samples = [json.loads(x) for x in (run / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert metrics["reward/failures"] == 0
    assert len(samples) == 2 * len(rows)
    assert all(isinstance(sample["score"], float) for sample in samples)
    return metrics, samples


def row(source: str | None = None, truth: Any = "4") -> dict[str, Any]:
    made = {"prompt": "2 + 2 =", "reward_model": {"ground_truth": truth}}
    return made if source is None else {**made, "data_source": source}


def test_every_function_scores_its_rows(tiny, tmp_path) -> None:
    installed = {
        entry.name
        for entry in default_index().entries("reward_function")
        if entry.distribution in ("dovetail-rewards", "dovetail-rewards-extra")
    }
    assert installed == FUNCTIONS.keys()
    chosen = dict(FUNCTIONS)
    if not any(level.available for level in available_levels()[:2]):
        del chosen["code"]
    functions = {f"my/{name}": {"name": name, **options} for name, (options, _) in chosen.items()}
    rows = [row(f"my/{name}", truth) for name, (_, truth) in chosen.items()]
    _, samples = step(tiny, tmp_path, rows, {"functions": functions})
    assert {sample["data_source"] for sample in samples} == functions.keys()


def test_every_manager_of_samples_takes_part(tiny, tmp_path) -> None:
    (tmp_path / "rule.py").write_text(RULE)

    def answer(request: Any, _: Any) -> tuple[int, Any]:
        if "samples" in request:
            return 200, {"results": [0.25] * len(request["samples"])}
        return 200, {"choices": [{"message": {"content": "score: 0.5"}}]}

    with reward_service(answer) as (url, _):
        judge = {"url": url.removesuffix("/score"), "model": "m", "template": "{{ response }}"}
        model = {"model": str(tiny_classifier()), "dtype": "float32", "device": "cpu"}
        managers = {
            "naive": {},
            "batch": {"wait_ms": 1},
            "parallel": {"workers": 1},
            "remote": {"url": url},
            "judge": judge,
            "reward_model": model,
        }
        scorers = {name: {"manager": {"name": name, **set_}} for name, set_ in managers.items()}
        reward = {
            "function": {"path": str(tmp_path / "rule.py")},
            "manager": {"name": "hybrid", "scorers": scorers},
        }
        metrics, samples = step(tiny, tmp_path, [row(), row()], reward)
    for sample in samples:
        parts = sample["components"]
        assert managers.keys() <= parts.keys()
        assert parts["naive"] == parts["batch"] == parts["parallel"]
        assert (parts["remote"], parts["judge"]) == (0.25, 0.5)
        total = sum(parts[name] for name in managers)
        assert sample["score"] == pytest.approx(total, abs=1e-5)
    assert metrics["reward/components/judge"] == 0.5


@pytest.mark.parametrize(
    ("source", "manager"), [(GROUP, "group"), (TOKENS, "naive")], ids=["pairs", "token rewards"]
)
def test_rewards_of_pairs_and_of_tokens_reach_the_update(tiny, tmp_path, source, manager) -> None:
    (tmp_path / "rule.py").write_text(source)
    reward = {"function": {"path": str(tmp_path / "rule.py")}, "manager": manager}
    metrics, samples = step(tiny, tmp_path, [row(), row()], reward)
    if manager == "group":
        # Each sample is preferred to the other in one order, or neither is: the mean is a half, or 0 for equal lengths.
        assert {sample["score"] for sample in samples} <= {0.0, 0.5, 1.0}
    else:
        lengths = [metrics["response_length/mean"] for _ in samples]
        mean = sum(sample["score"] for sample in samples) / len(samples)
        assert mean == pytest.approx(0.1 * lengths[0], rel=1e-5)


def test_a_validation_that_scores_nothing_says_why(tiny, tmp_path) -> None:
    (tmp_path / "pairs.py").write_text(
        "def compute_score(solution_a, solution_b):\n    return 0.5\n"
    )
    reward = {"manager": {"name": "group"}, "function": {"path": str(tmp_path / "pairs.py")}}
    step(tiny, tmp_path, [row()], reward, held_out=(row(), row()))
    [events] = tmp_path.glob("runs/*/*/events.jsonl")
    told = [line for line in events.read_text().splitlines() if "validation has no metrics" in line]
    assert len(told) == 2, "before and after the step"
    assert "pairs.py:compute_score" in told[0]


@pytest.mark.parametrize(
    "manager",
    [
        {"name": "naive", "workers": 1},
        pytest.param({"name": "parallel", "workers": 2}, marks=pytest.mark.nightly),
    ],
)
def test_what_a_reward_draws_from_torch_follows_the_seed_also_in_a_resumed_run(
    tiny, tmp_path, manager
) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(4)))
    config = {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "rows.jsonl")],
            "train_batch_size": 2,
            "max_prompt_length": 64,
            "max_response_length": 4,
        },
        "rollout": {"name": "hf", "n": 2},
        "algorithm": {"advantage": "grpo"},
        "reward": {"function": {"path": str(tmp_path / "draws.py")}, "manager": manager},
        "trainer": {"samples_per_step": -1},
        "tracking": ["jsonl"],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def scores(summary: dict[str, Any]) -> list[list[float]]:
        steps = sorted((Path(summary["directory"]) / "samples").glob("step_*.jsonl"))
        return [
            [json.loads(line)["score"] for line in step.read_text().splitlines()] for step in steps
        ]

    def whole(name: str, seed: int, steps: int = 2) -> dict[str, Any]:
        settings = [f"experiment={name}", f"seed={seed}", f"trainer.total_steps={steps}"]
        return train(tmp_path / "config.yaml", settings)

    before = torch.get_rng_state()
    first = scores(whole("first", 1))
    half = whole("half", 1, steps=1)
    assert scores(resume(half["directory"], ["trainer.total_steps=2"])) == first
    assert first[0] != first[1]
    assert scores(whole("other", 2, steps=1))[0] != first[0]
    assert torch.equal(torch.get_rng_state(), before), "the process's own generator is as it was"
