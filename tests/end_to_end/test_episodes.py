"""A run on episodes of many turns: what is trained on is what the engine saw, and what the policy produced alone."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dovetail_sdk.testing.chat_templates import CHATML

LOOP = '''
import random

from dovetail.interfaces import AgentLoop
from dovetail.sections import EpisodeSection


class Chat(AgentLoop):
    """Two to four turns, with a user's message or a text after each; some begin a further sequence, and some episodes fail."""

    name = "chat"
    api = ">=1.0,<2"
    Config = EpisodeSection
    capabilities = frozenset({"forks"})
    transitions = frozenset({"user"})

    async def run(self, session):
        rng = random.Random(session.sample_id)
        for number in range(rng.randrange(2, 5)):
            if number and rng.random() < 0.3:
                session = session.fork([{"role": "user", "content": "in short"}])
                session.count("forks")
            turn = await session.generate(max_new_tokens=rng.randrange(2, 9))
            session.reward(sum(c.isalpha() for c in turn.text) / 8)
            if rng.random() < 0.03:
                raise RuntimeError("the game is broken")
            if rng.random() < 0.5:
                await session.observe([{"role": "user", "content": f"go on, {number}"}])
            else:
                await session.observe(" (aside) ")
'''
REWARD = """
def compute_score(solution_str, trajectory):
    return {"turn_rewards": [turn["reward"] for turn in trajectory["turns"]]}
"""
CAPTURE = '''
from pathlib import Path

import numpy as np
from dovetail.interfaces import Stage

COLUMNS = ("trajectory_id", "group_id", "scores", "advantages", "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "token_weight_versions", "token_rewards")


class Capture(Stage):
    """Writes the columns of a step."""

    name = "capture"
    api = ">=1.0,<2"
    phase = "estimate"
    after = ("advantage",)

    @classmethod
    def requires(cls, config, facts):
        return frozenset(COLUMNS)

    def run(self, batch, step):
        columns = {name: np.array([*batch[name]], dtype=object) for name in COLUMNS}
        np.savez(Path(__file__).with_name(f"step_{step.number}.npz"), **columns)
        return batch
'''


@pytest.fixture
def episodes(config: Path, tmp_path: Path) -> Path:
    """A config that trains on episodes, 48 of them in a step."""
    document = yaml.safe_load(config.read_text())
    for name, text in (("loop", LOOP), ("my_reward", REWARD), ("capture", CAPTURE)):
        (tmp_path / f"{name}.py").write_text(text)
    document["data"] |= {"train_batch_size": 6, "max_response_length": 200}
    document["rollout"] |= {
        "n": 8,
        "agent_loop": {"path": str(tmp_path / "loop.py"), "attribute": "Chat"},
    }
    document["algorithm"]["loss_aggregation"] = "token_mean"
    document["algorithm"]["stages"] = [
        {"path": str(tmp_path / "capture.py"), "attribute": "Capture"}
    ]
    document["algorithm"]["logprob_check"] = {"every": 1}
    document["reward"] |= {"max_failure_share": 0.5}
    config.write_text(yaml.safe_dump(document))
    return config


@pytest.mark.usefixtures("report")
def test_a_run_trains_on_episodes_token_for_token(
    episodes: Path, tiny: Path, tmp_path: Path, inside: Callable[..., Any]
) -> None:
    from transformers import AutoModelForCausalLM

    inside("train", str(episodes))
    batch = np.load(tmp_path / "step_1.npz", allow_pickle=True)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert len(batch["response_ids"]) > 0.8 * 48
    shown = 0
    for prompt, response, mask, logs, versions, rewards in zip(
        *(batch[name] for name in batch.files[4:]), strict=True
    ):
        mask_T = np.asarray(mask, bool)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            scored = model(ids[None]).logits[0, :-1].log_softmax(-1)
        of_each = scored.gather(-1, ids[1:, None])[len(prompt) - 1 :, 0].numpy()
        np.testing.assert_allclose(np.asarray(logs, float)[mask_T], of_each[mask_T], atol=1e-4)
        assert not np.asarray(logs, float)[~mask_T].any()
        np.testing.assert_array_equal(np.asarray(versions)[~mask_T], -1)
        assert len(set(np.asarray(versions)[mask_T])) == 1
        assert not np.asarray(rewards, float)[~mask_T].any()
        shown += int((~mask_T).sum())
    assert shown > 500
    run = tmp_path / "runs" / "tests" / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in metrics if "episode/turns/mean" in m]
    assert len(steps) == 2
    assert all(2 <= m["episode/turns/mean"] <= 4 for m in steps)
    assert all(m["episode/observed_tokens/mean"] > 5 for m in steps)
    rows = [
        json.loads(line) for line in (run / "samples" / "step_1.jsonl").read_text().splitlines()
    ]
    failed = [row for row in rows if "failure" in row]
    assert {row["failure"]["kind"] for row in failed} <= {"harness"}
    assert all(row["trajectory"]["turns"] for row in rows)
    check_advantages(batch)
    # A row of the batch is a sequence, and one of the file a trajectory.
    last = np.flatnonzero(np.diff(batch["trajectory_id"].astype(int))) + 1

    def of_trajectories(name: str) -> list[np.ndarray]:
        return [np.concatenate(list(rows)) for rows in np.split(batch[name], last)]

    responses = of_trajectories("response_ids")
    masks, logs = of_trajectories("response_mask"), of_trajectories("rollout_log_probs")
    assert 0.1 < len(last) / len(batch["response_ids"]) < 0.95
    for place, row in enumerate(row for row in rows if "failure" not in row):
        tokens = row["tokens"]
        assert len(tokens["text"]) == len(responses[place])
        np.testing.assert_array_equal(tokens["mask"], masks[place])
        known = [log if log is not None else 0.0 for log in tokens["log_probs"]]
        np.testing.assert_allclose(known, np.asarray(logs[place], float), atol=1e-4)
        assert [log is None for log in tokens["log_probs"]] == [not m for m in tokens["mask"]]
        starts = np.cumsum([0, *(s["length"] for s in tokens.get("sequences", ()))])
        for turn in row["trajectory"]["turns"]:
            start = starts[turn["sequence"]]
            assert all(tokens["mask"][start + turn["start"] : start + turn["stop"]])
    packed = (run / "report" / "step_1.js").read_text().split('"')[3]
    shown = json.loads(gzip.decompress(base64.b64decode(packed)))
    turns = [turn for sample in shown for turn in sample["episode"]["turns"]]
    assert len(turns) > 8
    assert 2 in {turn["sequence"] for turn in turns}


def check_advantages(batch: Any) -> None:
    """Every sequence has the advantage of GRPO of its trajectory, which counts once in its group."""
    of_groups: dict[int, dict[int, float]] = {}
    for trajectory, group, score in zip(
        batch["trajectory_id"], batch["group_id"], batch["scores"], strict=True
    ):
        of_groups.setdefault(group, {})[trajectory] = score
    for trajectory, group, found in zip(
        batch["trajectory_id"], batch["group_id"], batch["advantages"], strict=True
    ):
        scores = np.array(list(of_groups[group].values()), np.float64)
        spread = scores.std(ddof=1)
        expected = (of_groups[group][trajectory] - scores.mean()) / (spread + 1e-6)
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_template_that_changes_earlier_turns_is_refused_where_the_config_says_so(
    episodes: Path, inside: Callable[..., Any]
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' and not loop.last %}{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
    )
    done = inside(
        "train",
        str(episodes),
        f"model.chat_template={json.dumps(template)}",
        "rollout.agent_loop.on_history_change=refuse",
        check=False,
    )
    assert done.exit_code == 2
    assert "rollout.agent_loop.on_history_change=refuse" in done.output
    assert "renders earlier turns differently" in done.output


@pytest.mark.nightly
@pytest.mark.parametrize(("action", "told"), [("mask", "masked"), ("drop", "filtered")])
def test_a_filter_leaves_out_episodes_and_each_turn_has_an_advantage_of_its_own(
    episodes: Path, tmp_path: Path, inside: Callable[..., Any], action: str, told: str
) -> None:
    loop = LOOP.replace('capabilities = frozenset({"forks"})', "").replace("< 0.3", "< 0")
    (tmp_path / "loop.py").write_text(loop)
    filters = (
        f"[{{name: episode_outcome, outcomes: [no_answer], answer: '[a-m]', action: {action}}}]"
    )
    inside(
        "train",
        str(episodes),
        "algorithm.advantage=gigpo",
        f"algorithm.sample_filters={filters}",
        "trainer.total_steps=1",
        "trainer.samples_per_step=-1",
    )
    (samples,) = (tmp_path / "runs").rglob("samples/step_1.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    scored = [row for row in rows if row["score"] is not None]
    unanswered = [not re.search("[a-m]", row["trajectory"]["turns"][-1]["text"]) for row in scored]
    assert 0 < sum(unanswered) < len(scored)
    assert [row.get(told) == "episode_outcome" for row in scored] == unanswered
    batch = np.load(tmp_path / "step_1.npz", allow_pickle=True)
    assert len(batch["scores"]) == len(scored) - (sum(unanswered) if action == "drop" else 0)
    advantages = [
        np.unique(np.asarray(row, float)[np.asarray(mask, bool)])
        for row, mask in zip(batch["advantages"], batch["response_mask"], strict=True)
    ]
    assert max(map(len, advantages)) > 1


@pytest.mark.nightly
def test_what_the_page_shows_runs(
    episodes: Path, root: Path, tmp_path: Path, inside: Callable[..., Any]
) -> None:
    page = (root / "docs" / "agents.md").read_text()
    for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    document = yaml.safe_load(episodes.read_text())
    shown = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    loops = [part["rollout"]["agent_loop"] for part in shown if "rollout" in part]
    assert [loop.get("attribute", loop.get("name")) for loop in loops] == [
        "Guess",
        "tool_agent",
        "Notes",
    ]
    for number, loop in enumerate(loops):
        for section in (loop, *loop.get("tools", ())):
            if "path" in section:
                section["path"] = str(tmp_path / section["path"])
        limits = {"max_turns": 3, "max_turn_tokens": 8}
        document["rollout"] |= {"agent_loop": {**loop, **limits}}
        document["data"] |= {"max_response_length": 300, "max_prompt_length": 900}
        document["model"] |= {"chat_template": CHATML}
        document["experiment"] = f"page_{number}"
        episodes.write_text(yaml.safe_dump(document))
        inside("train", str(episodes), "trainer.total_steps=1")
        path = tmp_path / "runs" / "tests" / f"page_{number}" / "samples" / "step_1.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(row["score"] is not None for row in rows)
