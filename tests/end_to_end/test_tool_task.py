"""A policy learns which of two tools to call: its answers are right where it calls the right one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

TOOLS = '''
import re

from dovetail.errors import ToolError
from dovetail.interfaces import ParsedTurn, ToolCall, ToolParser

CALL = re.compile(r"(\\w+)\\((\\d+),(\\d+)\\)")


def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: A number.
        b: A number.
    """
    return str(a + b)


def multiply(a: int, b: int) -> str:
    """Multiply.

    Args:
        a: A number.
        b: A number.
    """
    return str(a * b)


class Brackets(ToolParser):
    """Reads `add(3,4)`."""

    name = "brackets"
    api = ">=1.0,<2"

    def parse(self, text, tools):
        calls = tuple(
            ToolCall(id=f"call_{i}", name=name, arguments={"a": int(a), "b": int(b)})
            for i, (name, a, b) in enumerate(CALL.findall(text))
        )
        return ParsedTurn(content=CALL.sub("", text), calls=calls)
'''
REWARD = """
def compute_score(solution_str, ground_truth, trajectory=None):
    last = solution_str if trajectory is None else trajectory["turns"][-1]["text"]
    return float(last.removesuffix("<|end|>").strip() == ground_truth)
"""
TEMPLATE = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.values() | join(',') }}){% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIGNS = {"+": ("add", int.__add__), "*": ("multiply", int.__mul__)}


def problem(a: int, sign: str, b: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"{a}{sign}{b}"}],
        "reward_model": {"ground_truth": str(SIGNS[sign][1](a, b))},
    }


def demonstration(a: int, sign: str, b: int, tool: str) -> dict[str, Any]:
    """A conversation in which some tool is called, and its result repeated."""
    result = {name: str(operate(a, b)) for name, operate in SIGNS.values()}[tool]
    turns = (f"{a}{sign}{b}", f"{tool}({a},{b})", result, result)
    roles = ("user", "assistant", "user", "assistant")
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_policy_learns_which_tool_to_call(tmp_path: Path, inside: Callable[..., Any]) -> None:
    """Half of the demonstrations call the wrong tool, so that only the reward says which is right."""
    from dovetail_demo.model import make_base

    rng = np.random.default_rng(0)
    problems = [(a, s, b) for a in range(2, 12) for s in SIGNS for b in range(2, 12)]
    rng.shuffle(problems)
    problems = [(int(a), str(s), int(b)) for a, s, b in problems]
    held_out, train = problems[:40], problems[40:]
    names = [name for name, _ in SIGNS.values()]
    rows = [
        demonstration(*train[i], tool=str(rng.choice(names)))
        for _ in range(60)
        for i in rng.permutation(len(train))
    ]
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "my_reward.py").write_text(REWARD)
    base = {
        "seed": 1,
        "output_dir": str(tmp_path / "runs"),
        "project": "tools",
        "model": {
            "path": str(make_base(tmp_path / "base", 1)),
            "dtype": "float32",
            "chat_template": TEMPLATE,
        },
    }
    sft = {
        **base,
        "experiment": "sft",
        "data": {
            "train_files": written(tmp_path / "sft.jsonl", rows),
            "sampler": "sequential",
            "train_batch_size": 64,
            "max_prompt_length": 16,
            "max_response_length": 48,
        },
        "actor": {
            "objective": "nll",
            "optim": {"lr": 2e-3, "betas": [0.9, 0.95], "warmup_steps": 10, "schedule": "linear"},
        },
        "trainer": {"name": "supervised"},
    }
    here = str(tmp_path / "tools.py")
    grpo = {
        **base,
        "experiment": "grpo",
        "model": {**base["model"], "path": str(tmp_path / "runs" / "tools" / "sft" / "final")},  # type: ignore[dict-item]
        "data": {
            "train_files": written(tmp_path / "train.jsonl", [problem(*p) for p in train]),
            "val_files": written(tmp_path / "val.jsonl", [problem(*p) for p in held_out]),
            "train_batch_size": 32,
            "max_prompt_length": 16,
            "max_response_length": 64,
        },
        "rollout": {
            "name": "hf",
            "n": 8,
            "agent_loop": {
                "name": "tool_agent",
                "tools": [{"path": here, "attribute": name} for name in names],
                "parser": {"path": here, "attribute": "Brackets"},
                "max_turns": 3,
                "max_turn_tokens": 24,
            },
        },
        "actor": {"optim": {"lr": 3e-4, "betas": [0.9, 0.95], "warmup_steps": 2}},
        "algorithm": {"advantage": "grpo", "policy_loss": "ppo_clip"},
        "reward": {"function": {"path": str(tmp_path / "my_reward.py")}},
        "trainer": {"total_steps": 25, "save_every": 0},
    }
    for name, document in (("sft", sft), ("grpo", grpo)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
        inside("train", str(tmp_path / f"{name}.yaml"))
    lines = (tmp_path / "runs" / "tools" / "grpo" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    accuracy = [m["val/mean@1"] for m in metrics if "val/mean@1" in m]
    print(accuracy, [m["episode/turns/mean"] for m in metrics if "episode/turns/mean" in m])
    assert accuracy[-1] - accuracy[0] >= 0.3
    # The same policy without its tools.
    final = str(tmp_path / "runs" / "tools" / "grpo" / "final")
    told = inside(
        *("eval", final, f"data.val_files={tmp_path / 'val.jsonl'}", "--json"),
        f"reward.function.path={tmp_path / 'my_reward.py'}",
    )
    print(told.output)
