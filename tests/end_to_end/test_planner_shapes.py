"""One run for each shape that a plan can take: critic, greedy baseline, reference, refill, correction, warm-up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from run_files import assert_same, steps_of, tensors_of
from safetensors.numpy import load_file

from dovetail.config import load_config
from dovetail.planning.plan import Plan
from dovetail.run.data import load_data, plan_from_data
from dovetail.run.run import resume, train

CRITIC = ["algorithm.advantage=gae", "critic.optim.lr=1.0e-2"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Where the runs of `config` go."""
    return tmp_path / "runs" / "tests"


def planned(config: Path, *overrides: str) -> Plan:
    loaded = load_config(config, overrides)
    return plan_from_data(loaded.config, load_data(loaded.config))


def stages(config: Path, *overrides: str) -> list[str]:
    return [stage.name for stage in planned(config, *overrides).stages]


def test_a_critic_is_there_because_gae_requires_values(config, runs):
    assert "score_critic" not in stages(config)
    assert {"score_critic", "update_critic"} <= set(stages(config, *CRITIC))
    train(config, [*CRITIC, "actor.mini_batch_size=2", "critic.epochs=2"])
    first, *_, last = steps_of(runs / "run")
    assert first["critic/value_loss"] > 0
    assert first["critic/explained_variance"] <= 1
    assert first["critic/grad_norm"] > 0
    assert last["critic/value_mean"] != first["critic/value_mean"]
    roles = {name.split("/")[0] for name in tensors_of(runs / "run", 3)}
    assert roles == {"actor", "critic"}


def test_a_run_with_a_critic_resumes_bit_identically(config, runs):
    settings = [*CRITIC, "actor.mini_batch_size=2"]
    train(config, [*settings, "experiment=whole"])
    train(config, [*settings, "experiment=parts", "trainer.total_steps=2"])
    resume(runs / "parts", ["trainer.total_steps=3"])
    assert_same(tensors_of(runs / "parts", 3), tensors_of(runs / "whole", 3))
    moments = tensors_of(runs / "whole", 3, part="moments")
    assert {name.split("/")[0] for name in moments} == {"actor", "critic"}
    assert_same(tensors_of(runs / "parts", 3, part="moments"), moments)


def test_while_the_critic_warms_up_the_actor_stays_as_it_is(config, runs, tiny):
    train(config, [*CRITIC, "critic.warmup_steps=2"])
    actor = {
        step: {n: v for n, v in tensors_of(runs / "run", step).items() if n.startswith("actor/")}
        for step in (1, 2, 3)
    }
    before = load_file(tiny / "model.safetensors")
    for name, value in actor[2].items():
        np.testing.assert_array_equal(value, before[name.removeprefix("actor/")])
    assert any((actor[3][name] != value).any() for name, value in actor[2].items())
    assert steps_of(runs / "run")[0]["critic/value_loss"] > 0


def test_a_reference_is_there_for_kl_in_the_reward(config, runs):
    overrides = ["algorithm.kl.in_reward.coef=0.05", "algorithm.advantage=reinforce_plus_plus"]
    assert {"score_actor", "score_ref", "kl_penalty"} <= set(stages(config, *overrides))
    train(config, overrides)
    first, *_, last = steps_of(runs / "run")
    assert first["reward/kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert last["reward/kl_penalty"] > 1e-4


def test_groups_without_a_difference_are_replaced(config, runs, tmp_path):
    # Prompts with an even sum always score 1: half of all groups teach nothing.
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if int(ground_truth) % 2 == 0 else len(solution_str) % 7 / 7\n"
    )
    overrides = ["algorithm.sample_filters=[equal_rewards]", "algorithm.max_generation_rounds=6"]
    train(config, [*overrides, "trainer.total_steps=2"])
    for step in steps_of(runs / "run"):
        assert step["filter/kept_groups"] == 4
        assert step["filter/rounds"] >= 1
    assert sum(step["filter/equal_rewards/dropped_groups"] for step in steps_of(runs / "run")) > 0
    state = json.loads((runs / "run" / "checkpoints" / "step_2" / "state.json").read_text())
    reasons = json.dumps(state["ledger"])
    assert "filter:equal_rewards" in reasons


def test_a_refilled_run_resumes_bit_identically(config, runs, tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if int(ground_truth) % 2 == 0 else len(solution_str) % 7 / 7\n"
    )
    settings = ["algorithm.sample_filters=[equal_rewards]", "algorithm.max_generation_rounds=3"]
    train(config, [*settings, "experiment=whole"])
    train(config, [*settings, "experiment=parts", "trainer.total_steps=1"])
    resume(runs / "parts", ["trainer.total_steps=3"])
    assert_same(tensors_of(runs / "parts", 3), tensors_of(runs / "whole", 3))


def test_a_step_without_any_group_left_counts_and_changes_nothing(config, runs, tmp_path, tiny):
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0\n"
    )
    overrides = ["algorithm.sample_filters=[equal_rewards]", "trainer.total_steps=2"]
    assert train(config, overrides)["steps"] == 2
    before = load_file(tiny / "model.safetensors")
    for name, value in tensors_of(runs / "run", 2).items():
        np.testing.assert_array_equal(value, before[name.removeprefix("actor/")])


@pytest.mark.parametrize(
    ("correction", "overrides"),
    [
        ("decoupled_seq_is_rs", []),
        ("bypass_ppo_clip", ["actor.mini_batch_size=2"]),
        pytest.param("decoupled_token_is", [], marks=pytest.mark.nightly),
        pytest.param(
            "bypass_pg_is", ["algorithm.policy_loss=reinforce"], marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rollout_correction_reports_how_far_the_policies_are_apart(
    config, runs, correction, overrides
):
    chosen = f"algorithm.rollout_correction={correction}"
    train(config, [chosen, *overrides, "trainer.total_steps=2"])
    for step in steps_of(runs / "run"):
        assert abs(step["rollout_corr/kl"]) < 1e-2
        assert step["rollout_corr/training_ppl"] > 1


def test_several_epochs_stop_early_once_the_policy_has_moved_too_far(config, runs):
    overrides = ["actor.mini_batch_size=2", "actor.epochs=4", "actor.max_kl=1.0e-6"]
    train(config, [*overrides, "trainer.total_steps=1"])
    [step] = steps_of(runs / "run")
    assert step["actor/early_stop"] == 1
    assert 1 < step["actor/updates"] < 8
