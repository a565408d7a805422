"""A teacher with its own Ray workers."""

import pytest
from run_files import steps_of

from dovetail import train

ADVANTAGE = "algorithm.stages=[{name: teacher_advantage, reward_coef: 0}]"
OFFLINE = "trainer={name: supervised, total_steps: 2}"
TOP = "actor.objective={name: distill, top_k: 8, plus: {name: nll}}"
POOL = "runtime={name: ray, pools: {teachers: {roles: teacher, workers_per_node: 2}}}"


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([ADVANTAGE], ("distill/reverse_kl", "actor/grad_norm")),
        ([OFFLINE, TOP], ("actor/divergence", "actor/teacher_mass", "actor/grad_norm")),
    ],
)
def test_a_teacher_scores_in_a_pool_of_its_own(config, tmp_path, overrides, names):
    pytest.importorskip("ray", reason="needs dovetail-runtime-ray")
    found = {}
    for name, runtime in (("apart", [POOL]), ("together", [])):
        train(config, [*overrides, *runtime, f"experiment={name}"])
        found[name] = steps_of(tmp_path / "runs" / "tests" / name)
    assert len(found["apart"]) == 2
    for apart, together in zip(found["apart"], found["together"], strict=True):
        for name in names:
            assert apart[name] == pytest.approx(together[name], rel=1e-3, abs=1e-4), name
