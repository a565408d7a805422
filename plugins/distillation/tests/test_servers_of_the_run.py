"""Teachers on servers that the run starts, with a stand-in for vLLM; test_served_by_vllm.py tests real vLLM."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from run_files import steps_of

from dovetail import check, plan, train
from dovetail.errors import DovetailError

pytestmark = pytest.mark.ray


def served(model, python, replicas=2, **more):
    serve = {"replicas": replicas, "accelerators": 0, "python": str(python), **more}
    stage = {
        "name": "score_teacher",
        "teachers": {"default": "large"},
        "endpoints": {"large": {"model": str(model), "serve": serve}},
    }
    return [f"algorithm.stages=[{stage}, {{name: teacher_advantage, reward_coef: 0}}]"]


@pytest.fixture
def python(tmp_path):
    """The stand-in for an interpreter with vLLM."""
    pytest.importorskip("ray", reason="needs dovetail-runtime-ray")
    program = tmp_path / "python"
    stand_in = Path(__file__).with_name("server_stand_in.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    program.chmod(0o755)
    return program


def test_the_run_starts_them_and_trains_as_with_a_role_and_survives_a_death(
    config, without_role, teacher, python, tmp_path
):
    by_role = "algorithm.stages=[{name: teacher_advantage, reward_coef: 0}]"
    train(config, [by_role, "experiment=role"])
    model = tmp_path / "served"
    shutil.copytree(teacher, model)
    # The server ends during the second step's requests, and is restarted.
    (model / "die_after").write_text("6")
    overrides = [*served(model, python), "runtime=ray", "experiment=served"]
    train(without_role, overrides)
    assert not (model / "die_after").exists()
    roles, servers = (steps_of(tmp_path / "runs" / "tests" / name) for name in ("role", "served"))
    assert len(servers) == 2
    for mine, theirs in zip(servers, roles, strict=True):
        for name in ("distill/reverse_kl", "actor/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
    assert list((tmp_path / "runs/tests/served/logs").glob("teacher-large-*.log"))


def test_plan_and_check_say_what_they_take(without_role, teacher, python):
    overrides = [*served(teacher, python, accelerators=4), "runtime=ray"]
    made = json.dumps(plan(without_role, overrides))
    assert "run, each with 4 accelerators" in made
    assert "GiB of weights" in made
    assert any("2 vLLM servers" in note for note in check(str(without_role), overrides).notes)


@pytest.mark.parametrize(
    ("gpus", "replicas", "accelerators", "short"),
    [(2, 1, 2, False), (2, 2, 0, False), (2, 2, 2, True), (2, 1, 4, True), (8, 1, 2, False)],
)
def test_servers_that_do_not_fit_beside_the_pools_are_warned_of(
    without_role, teacher, python, gpus, replicas, accelerators, short
):
    runtime = f"runtime={{name: ray, gpus_per_node: {gpus}, ray_init: {{num_gpus: 4}}}}"
    servers = served(teacher, python, replicas, accelerators=accelerators)
    warnings = check(str(without_role), [*servers, runtime]).warnings
    found = [one.message for one in warnings if one.rule == "teachers_do_not_fit"]
    assert len(found) == short
    assert all(f"{replicas * accelerators} accelerator(s) besides" in m for m in found)


def test_what_can_not_be_served_is_refused(without_role, teacher, python, tmp_path):
    (finding,) = check(str(without_role), served(teacher, python)).errors
    assert "runtime.name=inline" in finding.message
    with pytest.raises(DovetailError, match="inline"):
        train(without_role, served(teacher, python))
    with pytest.raises(DovetailError, match="`url` and `serve`"):
        check(str(without_role), [served(teacher, python)[0].replace("'serve'", "'url': 'http://x', 'serve'")])  # fmt: skip
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no module named vllm\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(DovetailError, match="module named vllm"):
        train(without_role, [*served(teacher, broken, replicas=1), "runtime=ray"])
