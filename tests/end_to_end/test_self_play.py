"""Runs that make their own preferences: pairs of a rollout, and win rates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from run_files import steps_of, tensors_of

from dovetail.errors import DataError
from dovetail.run.run import train

ONLINE_DPO = ("actor.objective={name: dpo, beta: 0.5}", "algorithm.stages=[best_worst_pairs]")


def test_online_dpo_trains_on_the_best_and_the_worst_answer_to_each_prompt(
    config: Path, tmp_path: Path
) -> None:
    train(config, [*ONLINE_DPO, "actor.optim.lr=1e-3", "trainer.total_steps=2"])
    first, second = steps_of(tmp_path / "runs" / "tests" / "run")
    assert first["reward/pairs"] + first["reward/tied_groups"] == 4
    assert first["reward/pairs"] >= 2
    assert first["actor/updates"] == 1
    assert first["actor/loss"] == pytest.approx(np.log(2), abs=1e-6)  # the policy is its reference
    assert abs(second["actor/margin"]) > 1e-4


def test_a_step_of_tied_groups_changes_no_weight_and_says_so(config: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("def compute_score(solution_str):\n    return 0.5\n")
    train(config, [*ONLINE_DPO, "trainer.total_steps=2"])
    run = tmp_path / "runs" / "tests" / "run"
    first, _ = steps_of(run)
    assert first["reward/tied_groups"] == 4
    assert first["actor/updates"] == 0
    one, two = tensors_of(run, 1, role="actor"), tensors_of(run, 2, role="actor")
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert "group is left" in (run / "events.jsonl").read_text()
    state = json.loads((run / "checkpoints" / "step_2" / "state.json").read_text())
    assert "best_worst_pairs" in json.dumps(state["ledger"])


@pytest.mark.nightly
def test_sppo_draws_log_ratios_to_win_rates(config: Path, tmp_path: Path) -> None:
    train(
        config,
        [
            "actor.objective={name: sppo, eta: 4}",
            "actor.epochs=4",
            "algorithm.advantage=win_rate",
            "ref.update.every=2",
        ],
    )
    first, second, third = steps_of(tmp_path / "runs" / "tests" / "run")
    assert first["actor/updates"] == 4
    assert abs(second["actor/kl"]) > 1e-4
    assert {"follow_actor"} <= {
        name.removeprefix("time/") for name in second if name.startswith("time/")
    }
    assert np.isfinite(third["actor/loss"])


def test_spin_learns_the_datasets_responses_and_leaves_the_check_of_log_probs_in_place(
    config: Path, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps({**row, "response": "aaaa"}) + "\n" for row in rows))
    spin = ["actor.objective={name: dpo, beta: 0.5}", "algorithm.stages=[spin_pairs]"]
    train(config, [*spin, "ref.update.every=2", "actor.optim.lr=3e-3"])
    first, second, third = steps_of(tmp_path / "runs" / "tests" / "run")
    assert first["reward/pairs"] == 16
    assert first["logprob_check/prob_diff_mean"] < 1e-4
    assert first["actor/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert second["actor/loss"] < first["actor/loss"]
    assert third["actor/loss"] == pytest.approx(np.log(2), abs=1e-6)  # its own opponent again
    assert third["actor/chosen_log_prob"] > first["actor/chosen_log_prob"]


def test_spin_without_responses_names_the_row(config: Path) -> None:
    spin = ["actor.objective=dpo", "algorithm.stages=[spin_pairs]"]
    with pytest.raises(DataError, match=r"train\.jsonl.*has no response") as raised:
        train(config, spin)
    assert "column `response`" in (raised.value.hint or "")
