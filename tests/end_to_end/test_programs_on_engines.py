"""Programs on OpenAI's client, on each engine, in training: every sequence that is trained on is what the engine saw and produced.

On a machine with an accelerator engines and training compute there. `-s` shows the figures.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines_here import ACCELERATOR, engine_settings, needs, served_here
from transformers import AutoTokenizer

import dovetail
from dovetail.telemetry import read_rows
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.random_episodes import EngineCall, RecordedEngine

STEPS, PROMPTS, SAMPLES, TURNS = 3, 8 if ACCELERATOR else 2, 4, 3
COLUMNS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "token_weight_versions")  # fmt: skip
PROGRAM = """
import json, os
from openai import OpenAI

client = OpenAI()
messages = json.loads(os.environ["DOVETAIL_ROW"])["prompt"]
said = ""
for turn in range(3):
    request = {"model": "policy", "messages": messages, "max_tokens": 24}
    if turn == 1:
        events = client.chat.completions.create(**request, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    else:
        text = client.chat.completions.create(**request).choices[0].message.content or ""
    said += text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"more {turn}"}]
with open(os.environ["DOVETAIL_OUTPUT_FILE"], "w") as file:
    json.dump({"reward": sum(c.isalpha() for c in said) / 50}, file)
"""
ON = [
    pytest.param("hf", marks=pytest.mark.proofs),
    pytest.param("vllm", marks=[pytest.mark.nightly, pytest.mark.vllm, needs("vllm")]),
    pytest.param("sglang", marks=[pytest.mark.nightly, pytest.mark.sglang, needs("sglang")]),
]


@pytest.mark.timeout(900)
@needs("openai")
@pytest.mark.parametrize("engine", ON)
def test_a_program_is_trained_on_as_each_engine_saw_it(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[EngineCall] = []
    module = importlib.import_module(f"dovetail_rollout_{engine}.rollout")
    cls = getattr(module, f"{engine.capitalize()}Rollout")
    start = cls.start

    def recorded(self: Any) -> None:
        start(self)
        RecordedEngine(self, calls)

    monkeypatch.setattr(cls, "start", recorded)
    with served_here(engine, "cuda" if ACCELERATOR else "cpu"):
        run = Path(dovetail.train(config(engine, tmp_path))["directory"])
    rows = [row for row in read_rows(run / "metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == STEPS
    assert not any(row["reward/failures"] for row in rows)
    trained = [s for number in range(1, STEPS + 1) for s in kept(tmp_path / f"step_{number}.npz")]
    same = sum(as_produced(sequence, calls) for sequence in trained)
    episodes = STEPS * PROMPTS * SAMPLES
    tokens = sum(int(sequence["response_mask"].sum()) for sequence in trained)
    produced = sum(len(completion.response_ids) for _, completion in calls)
    sys.stdout.write(
        f"openai on {engine}, {'GPU' if ACCELERATOR else 'CPU'}: {STEPS} steps, {episodes} episodes, {len(calls)} calls; "
        f"audit {same / len(trained):.1%} of {len(trained)} sequences, sequences an episode {len(trained) / episodes:.2f}, "
        f"tokens trained / produced {tokens / produced:.3f}, {tokens} tokens; "
        f"rewards {' '.join(format(row['reward/mean'], '.3f') for row in rows)}\n"
    )
    assert len(calls) == TURNS * episodes
    assert same == len(trained) == episodes
    assert tokens == produced
    versions = {int(v) for s in trained for v in s["token_weight_versions"][s["response_mask"]]}
    assert versions == {*range(1, STEPS + 1)}


def config(engine: str, directory: Path) -> dict[str, Any]:
    """A run of a random model on the program, with what it trains on kept."""
    device = "cuda" if ACCELERATOR else "cpu"
    model = tiny_model_and_tokenizer(directory / "model", vocab_size=320, hidden_size=256)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    (directory / "agent.py").write_text(PROGRAM)
    rows = [
        {"prompt": [{"role": "user", "content": f"number {n}"}]} for n in range(PROMPTS * STEPS)
    ]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loop = {
        "name": "program",
        "command": f"{sys.executable} {directory / 'agent.py'}",
        "score": "output",
    }
    return {
        "output_dir": str(directory),
        "model": {"path": str(model), "dtype": "bfloat16" if ACCELERATOR else "float32"},
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "train_batch_size": PROMPTS,
            "max_prompt_length": 64,
            "max_response_length": 400,
        },
        "rollout": {
            "name": engine,
            "n": SAMPLES,
            "agent_loop": loop,
            **engine_settings(engine, device, max_model_len=512),
        },
        "algorithm": {"stages": [{"path": str(Path(__file__).with_name("kept_batches.py")), "attribute": "KeepBatches"}]},
        "reward": {"function": "episode"},
        "trainer": {"total_steps": STEPS, "save_last": False, "export": "none"},
    }  # fmt: skip


def kept(file: Path) -> Iterator[dict[str, np.ndarray]]:
    """The sequences of a step, each with its columns."""
    with np.load(file) as step:
        for row in range(len(step["trajectory_id"])):
            yield {
                name: step[name][slice(*step[f"{name}/offsets"][row : row + 2])] for name in COLUMNS
            }


def as_produced(sequence: dict[str, np.ndarray], calls: Sequence[EngineCall]) -> bool:
    """Whether every token with mask 1 of a sequence is of a call whose prompt is what stands before, and others are of none."""
    prompt, response, mask, log_probs, versions = (sequence[name] for name in COLUMNS)
    tokens, made = np.concatenate([prompt, response]), np.zeros(len(response), np.bool_)
    for request, completion in calls:
        begin, length = len(request.prompt_ids), len(completion.response_ids)
        asked = np.concatenate([request.prompt_ids, completion.response_ids])
        place = slice(begin - len(prompt), begin - len(prompt) + length)
        if (
            begin >= len(prompt)
            and np.array_equal(tokens[: begin + length], asked)
            and np.array_equal(log_probs[place], completion.log_probs)
            and np.array_equal(versions[place], completion.weight_versions)
        ):
            made[place] = True
    return bool(np.array_equal(made, mask))
