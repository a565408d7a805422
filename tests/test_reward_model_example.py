"""The example that trains a reward model: its config learns, and the reward manager scores as the model was trained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import make_plugin
from dovetail.run.run import train
from dovetail.sections import RewardSection
from dovetail_rewards.model_config import RewardModelConfig
from dovetail_rollouts import Scorer
from dovetail_sdk.testing import make_sample, tiny_model, tiny_tokenizer

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "reward_model"


def test_no_numbers_of_a_held_out_pair_stand_together_in_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from pairs import larger_numbers

    train, held_out = larger_numbers(1)
    seen = {(pair.chosen, pair.rejected) for pair in train}
    assert not seen & {(pair.chosen, pair.rejected) for pair in held_out}
    assert all(int(pair.chosen) > int(pair.rejected) for pair in (*train, *held_out))


def test_its_config_learns_and_what_it_writes_scores_as_a_reward_model(tmp_path: Path) -> None:
    """The margin of the held-out pairs is that of the reward manager's scores."""
    base = tmp_path / "base"
    tiny_model(base, tiny_tokenizer(base, vocab_size=300), head="value", seed=3)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdef"), 5)) for _ in range(72)]
    rows = [{"prompt": text[:2], "chosen": f"{text}!", "rejected": f"{text}?"} for text in texts]
    for name, part in (("train", rows[:48]), ("held_out", rows[48:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    summary = train(
        EXAMPLE / "reward_model.yaml",
        [
            f"model.path={base}",
            f"data.train_files={tmp_path}/train.jsonl",
            f"data.val_files={tmp_path}/held_out.jsonl",
            f"output_dir={tmp_path}/runs",
            "data.train_batch_size=16",
            "actor.optim.lr=5e-3",
            "actor.optim.warmup_steps=1",
            "trainer.total_steps=15",
            "tracking=[jsonl]",
        ],
    )
    run = Path(summary["directory"])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "val/loss" in row]
    assert found[-1]["val/accuracy"] > 0.9
    assert found[-1]["val/loss"] < 0.5 * found[0]["val/loss"]
    assert found[-1]["val/brier"] < 0.1

    config = RewardModelConfig(
        name="reward_model", model=str(run / "final"), dtype="float32", device="cpu"
    )
    ref = PluginRef(kind="reward_manager", name="reward_model", config=config)
    manager: Any = make_plugin(ref, PluginContext())
    manager.start()

    async def scores() -> Any:
        scorer = Scorer(manager, timeout=RewardSection().timeout)
        for number, row in enumerate(rows[48:]):
            for side in ("chosen", "rejected"):
                sample = make_sample(f"{number}.{side}", row[side], prompt=row["prompt"])
                scorer.add(sample, group=number, group_size=2)
        return await scorer.finish()

    outcomes = asyncio.run(scores())
    manager.close()
    margins = [
        outcomes[f"{number}.chosen"].value - outcomes[f"{number}.rejected"].value
        for number in range(24)
    ]
    assert found[-1]["val/margin"] == pytest.approx(np.mean(margins), abs=1e-3)
