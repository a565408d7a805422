"""`remote` on Ray: a rule and a reward model, scored in the runtime's processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config import config_from_mapping
from dovetail.interfaces import PluginContext
from dovetail.plugins import make_plugin
from dovetail.plugins.load import ref_for
from dovetail.sections import Pool
from dovetail_rewards.conformance.reward_model import tiny_classifier
from dovetail_rollouts import Scorer, configured_functions

ray_runtime = pytest.importorskip("dovetail_runtime_ray.runtime")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A runtime on a new cluster, with one small pool."""
    from dovetail_runtime_ray.config import RayConfig

    place = tmp_path_factory.mktemp("run")
    context = PluginContext(run_directory=place, logger=logging.getLogger("dovetail"))
    made = ray_runtime.RayRuntime(RayConfig(name="ray"), context)
    try:
        made.start()
        made.place([Pool(name="all", roles=("actor",))])
        yield made
    finally:
        made.close()


def scored(reward: dict[str, Any], runtime: Any, samples: Any) -> list[Any]:
    """Return the outcomes of the samples from the manager of a full config."""
    config = config_from_mapping({"model": {"path": "none"}, "reward": reward}).config.reward
    functions = configured_functions(config, PluginContext())
    context = PluginContext(reward_functions=functions, runtime=runtime)
    manager: Any = make_plugin(ref_for("reward_manager", config.manager), context)
    manager.start()

    async def main() -> list[Any]:
        scorer = Scorer(manager, timeout=config.timeout)
        for one in samples:
            scorer.add(one, group=0, group_size=len(samples))
        return list((await scorer.finish()).values())

    try:
        return asyncio.run(main())
    finally:
        manager.close()


def test_a_rule_is_scored_in_rays_processes(runtime, sample, tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(
        "import os\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    return {'score': len(solution_str), 'pid': str(os.getpid())}\n"
    )
    inner = {"name": "parallel", "workers": 1}
    reward = {
        "function": {"path": str(file)},
        "manager": {"name": "remote", "workers": 2, "calls": 1, "size": 4, "manager": inner},
    }
    outcomes = scored(reward, runtime, [sample(f"s{i}", "x" * i) for i in range(40)])
    assert [outcome.value for outcome in outcomes] == list(map(float, range(40)))
    assert len({outcome.extras["pid"] for outcome in outcomes}) == 2


@pytest.mark.parametrize(
    "accelerators",
    [
        pytest.param(0, marks=pytest.mark.nightly),
        pytest.param(
            1,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
def test_a_reward_model_scores_in_a_process_of_its_own(runtime, sample, accelerators) -> None:
    section = {"name": "reward_model", "model": str(tiny_classifier()), "dtype": "float32"}
    samples = [sample("a", "one"), sample("b", "two two")]
    remote = {"name": "remote", "workers": 1, "accelerators": accelerators, "manager": section}
    there = scored({"manager": remote}, runtime, samples)
    here = scored({"manager": {**section, "device": "cpu"}}, None, samples)
    assert [o.value for o in there] == pytest.approx([o.value for o in here], rel=1e-3)
