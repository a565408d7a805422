"""Further models of a config's own: trained with adapters, checkpointed and resumed as the actor is, in one process and on Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_files import steps_of, tensors_of

from dovetail.run.run import resume, train

SECOND = (
    "algorithm.advantage=gae",
    "roles.second={head: value, objective: value, engine: {name: fsdp2, lora: {rank: 2}}}",
    "roles.second={offload: true, optim: {lr: 1e-2}, mini_batch_size: 2}",
)


def test_a_further_role_is_trained_and_resumed_bit_identically(
    config: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs" / "tests"
    train(config, [*SECOND, "experiment=whole"])
    train(config, [*SECOND, "experiment=parts", "trainer.total_steps=2"])
    resume(runs / "parts", ["trainer.total_steps=3"])
    for part in ("weights", "moments"):
        whole, parts = tensors_of(runs / "whole", 3, part), tensors_of(runs / "parts", 3, part)
        assert {name.split("/")[0] for name in whole} == {"actor", "critic", "second"}
        assert whole.keys() == parts.keys()
        for name, value in whole.items():
            np.testing.assert_array_equal(value, parts[name], err_msg=name)
    first, *_, last = steps_of(runs / "whole")
    assert first["second/updates"] == 2  # 4 prompts a step, 2 a mini-batch
    assert first["second/value_loss"] == pytest.approx(first["critic/value_loss"], rel=0.5)
    assert last["second/value_mean"] != first["second/value_mean"]
    trained = {
        name for name in tensors_of(runs / "whole", 3, "moments") if name.startswith("second/")
    }
    assert trained
    assert all("lora" in name or "score" in name or "head" in name for name in trained), trained


@pytest.mark.nightly
@pytest.mark.ray
def test_a_further_role_has_a_pool_of_its_own_on_ray(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs dovetail-runtime-ray")
    overrides = [
        *SECOND,
        "trainer.total_steps=1",
        "runtime={name: ray, pools: {judges: {roles: second, workers_per_node: 2}}}",
    ]
    train(config, [*overrides, "experiment=apart"])
    train(config, [*SECOND, "trainer.total_steps=1", "experiment=together"])
    runs = tmp_path / "runs" / "tests"
    (apart,), (together,) = steps_of(runs / "apart"), steps_of(runs / "together")
    names = {name for name in together if name.startswith("second/")} - {"second/rss_bytes"}
    assert {"second/value_loss", "second/grad_norm", "second/updates"} <= names
    for name in names:
        assert apart[name] == pytest.approx(together[name], abs=1e-3), name
