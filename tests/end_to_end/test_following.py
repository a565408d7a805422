"""Models that follow the actor: a reference that is copied or averaged, in checkpoints, and what can't follow."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from run_files import lines_of, tensors_of

from dovetail.errors import PlanError
from dovetail.run.run import resume, train

KL = "algorithm.kl.in_loss={coef: 0.1}"


def kl_by_step(run: Path) -> list[float]:
    return [line["actor/kl"] for line in lines_of(run / "metrics.jsonl") if "actor/kl" in line]


def test_a_reference_is_copied_every_second_step_and_a_resumed_run_has_the_same_bits(
    config: Path, tmp_path: Path
) -> None:
    runs, overrides = tmp_path / "runs" / "tests", [KL, "ref.update.every=2"]
    train(config, [*overrides, "experiment=whole"])
    whole = runs / "whole"
    start, second, third = (tensors_of(whole, step, role="ref") for step in (1, 2, 3))
    moved = tensors_of(whole, 2, role="actor")
    assert start.keys() == moved.keys()
    assert any(not np.array_equal(start[name], moved[name]) for name in start)
    for name, value in moved.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)
        np.testing.assert_array_equal(third[name], value, err_msg=name)
    before, after, at_once = kl_by_step(whole)
    assert before == pytest.approx(0, abs=1e-6)  # step 1: both as they started
    assert after > 1e-4
    assert at_once == pytest.approx(0, abs=1e-6)
    assert not (whole / "actor_weights").exists()
    train(config, [*overrides, "experiment=parts", "trainer.total_steps=2"])
    resume(runs / "parts", ["trainer.total_steps=3"])
    for role in ("actor", "ref"):
        again = tensors_of(runs / "parts", 3, role=role)
        for name, value in tensors_of(whole, 3, role=role).items():
            np.testing.assert_array_equal(again[name], value, err_msg=f"{role} {name}")


@pytest.mark.nightly
def test_an_average_follows_its_recursion_also_of_a_further_role(
    config: Path, tmp_path: Path
) -> None:
    overrides = [KL, "ref.update.decay=0.75", "roles.slow={update: {every: 3, decay: 0.5}}"]
    train(config, overrides)
    run = tmp_path / "runs" / "tests" / "run"
    actor = [tensors_of(run, step, role="actor") for step in (1, 2, 3)]
    ref = [tensors_of(run, step, role="ref") for step in (1, 2, 3)]
    for before, after, target in zip(ref, ref[1:], actor[1:], strict=False):
        for name, value in after.items():
            expected = 0.75 * before[name].astype(np.float64) + 0.25 * target[name]
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    start, end = tensors_of(run, 2, role="slow"), tensors_of(run, 3, role="slow")
    for name, value in end.items():
        expected = 0.5 * start[name] + 0.5 * actor[2][name]
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.nightly
def test_a_reference_of_an_adapter_follows_by_its_adapter(config: Path, tmp_path: Path) -> None:
    overrides = [KL, "ref.update.every=2", "actor.engine.lora={rank: 2}"]
    train(config, [*overrides, "trainer.total_steps=3"])
    run = tmp_path / "runs" / "tests" / "run"
    copied, actor = tensors_of(run, 2, role="ref"), tensors_of(run, 2, role="actor")
    assert all("lora" in name for name in copied)
    for name, value in actor.items():
        np.testing.assert_array_equal(copied[name], value, err_msg=name)
    assert kl_by_step(run)[2] == pytest.approx(0, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.ray
def test_a_reference_follows_in_processes_of_its_own(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs dovetail-runtime-ray")
    pools = "{train: {roles: actor, workers_per_node: 2}, apart: {roles: ref, workers_per_node: 1}}"
    train(config, [KL, "ref.update.decay=0.5", "experiment=together"])
    train(
        config,
        [
            KL,
            "ref.update.decay=0.5",
            "experiment=apart",
            f"runtime={{name: ray, pools: {pools}}}",
        ],
    )
    runs = tmp_path / "runs" / "tests"
    expected = tensors_of(runs / "together", 3, role="ref")
    found = tensors_of(runs / "apart", 3, role="ref")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-3, err_msg=name)


def test_the_plan_says_who_follows(config: Path, planned) -> None:
    text = " ".join(
        planned(str(config), KL, "ref.update={every: 64}", "roles.slow.update.decay=0.99").split()
    )
    assert "follow_actor" in text
    assert "every 64 steps" in text
    assert "on fsdp2, averages" in text
    # Nothing reads the reference: there is none, and nothing follows.
    assert "follow_actor" not in planned(str(config), "ref.update.every=64")


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["roles.second={update: {}, objective: policy}"], "objective trains"),
        (["roles.second={update: {}, head: value}"], "value head"),
        ([KL, "ref={update: {}, engine: {name: fsdp2, lora: {rank: 2}}}"], "adapters"),
        (
            [KL, "ref.update={}", "actor.engine.lora={rank: 2}", "ref.path={other}"],
            "base models differ",
        ),
        ([KL, "ref.update={}", "ref.engine=megatron"], "'follows'"),
    ],
)
def test_what_cannot_follow_is_refused(
    config: Path, tiny: Path, tmp_path: Path, overrides: list[str], what: str
) -> None:
    if "ref.engine=megatron" in overrides:
        pytest.importorskip("dovetail_train_megatron", reason="needs dovetail-train-megatron")
    if any("{other}" in override for override in overrides):
        shutil.copytree(tiny, tmp_path / "other")
    filled = [override.replace("{other}", str(tmp_path / "other")) for override in overrides]
    with pytest.raises(PlanError, match=what) as raised:
        train(config, filled)
    assert raised.value.hint
