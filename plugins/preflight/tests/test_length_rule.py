"""The rule that compares the longest sample with the maximum tokens of a model's config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def sections(directory: Path, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The sections of a run with samples of 1000 + 1000 tokens, and a model whose config is on this machine."""
    (directory / "config.json").write_text(json.dumps(config))
    data = {"max_prompt_length": 1000, "max_response_length": 1000}
    return {"model": {"path": str(directory)}, "data": data, **more}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "qwen2", "max_position_embeddings": 1999}, 1999),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 499,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            1996,
        ),
        ({"model_type": "llama", "max_position_embeddings": 1024, "rope_scaling": LLAMA3}, 1024),
    ],
    ids=["rope", "learned", "linear", "llama3"],
)
def test_samples_longer_than_the_model_takes_are_an_error(
    judge: Any, tmp_path: Path, config: dict[str, Any], limit: int
) -> None:
    (finding,) = judge("rollout_too_short", sections(tmp_path, config))
    assert finding.severity == "error"
    assert f"takes at most {limit} tokens" in finding.message
    assert str(tmp_path / "config.json") in finding.message
    assert "max_response_length = 1000 + 1000 = 2000" in finding.message
    assert f"data.max_response_length={limit - 1000} " in finding.hint


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "max_position_embeddings": 2000},
        {"model_type": "qwen2", "max_position_embeddings": 1024, "rope_scaling": YARN},
        {"model_type": "qwen2", "max_position_embeddings": 4096, "rope_scaling": YARN},
        {"model_type": "mamba"},
        {"model_type": "bloom"},
        {"model_type": "of no such type"},
    ],
    ids=["rope", "yarn", "yarn in both", "mamba", "alibi", "unreadable"],
)
def test_a_model_that_takes_them_or_names_no_limit_is_not_spoken_of(
    judge: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    assert judge("rollout_too_short", sections(tmp_path, config)) == []


def test_one_fix_is_named_where_model_and_engine_are_both_too_short(
    judge: Any, tmp_path: Path
) -> None:
    short = {"model_type": "qwen2", "max_position_embeddings": 512}
    engine = {"name": "vllm", "max_model_len": 256}
    (finding,) = judge("rollout_too_short", sections(tmp_path, short, rollout=engine))
    assert "data.max_prompt_length= and data.max_response_length= to at most 512" in finding.hint


def test_responses_of_validation_count_where_there_is_one(judge: Any, tmp_path: Path) -> None:
    of_2000 = {"model_type": "qwen2", "max_position_embeddings": 2000}
    longer = {"validation": {"max_response_length": 1001}}
    run = sections(tmp_path, of_2000, rollout=longer)
    assert judge("rollout_too_short", run) == []
    (finding,) = judge("rollout_too_short", run, "data.val_files=[held_out.jsonl]")
    assert "set rollout.validation.max_response_length=1000 or less" in finding.hint


def test_the_limit_on_whole_examples_is_what_counts(judge: Any, tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "max_position_embeddings": 1500}
    made = sections(tmp_path, config, trainer={"name": "supervised"})
    made["data"]["max_length"] = 1500
    assert judge("rollout_too_short", made) == []
    made["data"]["max_length"] = 1501
    (finding,) = judge("rollout_too_short", made)
    assert "data.max_length = 1501" in finding.message
    assert "data.max_length=1500 " in finding.hint
