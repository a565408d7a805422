"""Servers that join, are drained and die while a real run trains on them: nothing is lost, and who joins has the run's weights."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from served_hf import HfServer, digest_of

from dovetail.checkpoint.store import CheckpointStore
from dovetail.cli.main import main
from dovetail.data.ledger import Ledger
from dovetail.run.run import train

SERVED = Path(__file__).parents[1] / "support" / "served_hf.py"
N, PROMPTS, EPOCHS, STEPS = 4, 12, 2, 6
ACTS = """
import json
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from dovetail.errors import DovetailError
from dovetail.interfaces import Stage
from dovetail_rollouts.pool_socket import ask
from dovetail.telemetry.run_directory import RunDirectory

HERE = Path(__file__).parent


class Acts(Stage):
    name = "acts"
    api = ">=1.0,<2"
    phase = "transform"

    def run(self, batch, step):
        run = RunDirectory(HERE / "runs" / "tests" / "run")
        for request in json.loads((HERE / "acts.json").read_text()).get(str(step.number), []):
            if "die" in request:
                urlopen(request["die"] + "/die").read()
                with suppress(OSError):  # a server in a thread ends a moment later
                    while True:
                        urlopen(request["die"] + "/health", timeout=1).read()
                continue
            if "notice" in request:
                urlopen(request["notice"] + "/dovetail/v1/drain", data=b"").read()
                continue
            if "busy" in request:
                (found,) = ask(run, {"command": "status"})
                members = {member["address"]: member for member in found["members"]}
                assert members[request["busy"]]["requests"] > 0
                continue
            answers = []
            try:
                for answer in ask(run, request):
                    answers.append(answer)
                    if answer.get("state") == "starting":
                        break  # it joins when this step is over
            except DovetailError as error:
                answers.append({"refused": str(error)})
            with (HERE / "answers.jsonl").open("a") as file:
                file.write(json.dumps({"step": step.number, "answer": answers[-1]}) + "\\n")
        return batch
"""


def check_policy(run: Path) -> None:
    """The page's policy finds what it looks at among the metrics of every step, and starts its program."""
    page = (Path(__file__).parents[2] / "docs" / "elastic-pool.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    started: list[list[str]] = []
    names["subprocess"] = SimpleNamespace(Popen=started.append)
    policy = names["PoolPolicy"]()
    policy.run_started(directory=run)
    rows = [json.loads(row) for row in (run / "metrics.jsonl").open(encoding="utf-8")]
    steps = [row for row in rows if "time/step" in row]
    for row in steps:
        policy.step_finished(step=10, metrics={**row, "time/rollout": 0.4 * row["time/step"]})
    assert started == [["./pool.sh", "grow", str(run)]] * STEPS


@pytest.fixture
def servers(tiny: Path, tmp_path: Path) -> Iterator[Callable[[bool, float], str]]:
    """Start a server on the tiny model, in a thread or as a process whose responses begin after a delay; returns its address."""
    pytest.importorskip("uvicorn")
    with ExitStack() as ending:
        count = 0

        def start(process: bool, delay: float) -> str:
            nonlocal count
            count += 1
            if not process:
                server = HfServer(str(tiny))
                server.begin()
                ending.callback(server.close)
                return server.url
            said = tmp_path / f"server-{count}"
            command = [sys.executable, str(SERVED), str(tiny), str(said), str(delay)]
            running = ending.enter_context(subprocess.Popen(command))
            ending.callback(running.kill)
            while not said.exists() or not said.read_text():
                assert running.poll() is None
                time.sleep(0.1)
            return said.read_text()

        yield start


@pytest.mark.parametrize(
    ("trainer", "runtime", "process"),
    [
        ("on_policy", "inline", False),
        pytest.param("streaming", "inline", True, marks=pytest.mark.nightly),
        pytest.param("on_policy", "ray", True, marks=[pytest.mark.nightly, pytest.mark.ray]),
    ],
)
def test_servers_join_are_drained_and_die_while_a_run_trains_and_nothing_is_lost(
    config: Path,
    tmp_path: Path,
    servers: Callable[[bool, float], str],
    trainer: str,
    runtime: str,
    process: bool,
) -> None:
    ahead = trainer == "streaming"
    # So long that the next step's responses are under way when a step has its own.
    first, second, third = (servers(process, 3.0 if ahead else 0.0) for _ in range(3))
    document = yaml.safe_load(config.read_text())
    document["rollout"] = {
        "path": str(SERVED),
        "attribute": "ServedHf",
        "n": N,
        "urls": [first],
        **({} if process else {"weight_transport": "disk"}),
    }
    document["trainer"] |= {"total_epochs": EPOCHS, "validate_after": False, "save_every": 3}
    document["trainer"] |= {"name": trainer, "validate_before": False}
    document["trainer"] |= {"on_sync": "abort"} if ahead else {}
    document["runtime"] = {"name": runtime}
    document["data"] |= {"val_files": []}
    document["algorithm"]["stages"] = [{"path": str(tmp_path / "acts.py"), "attribute": "Acts"}]
    config.write_text(yaml.safe_dump(document))
    (tmp_path / "acts.py").write_text(ACTS)
    status = {"command": "status"}
    drain = {"command": "drain", "member": first}
    leaves: dict[str, Any] = {"notice": first} if ahead else drain

    def busy(address: str) -> list[dict[str, Any]]:
        return [{"busy": address}] if ahead else []

    acts: dict[int, list[dict[str, Any]]] = {
        1: [{"command": "add", "address": second}],
        2: [status, *busy(first), leaves, {"die": first}],
        3: [status, {"command": "add", "address": third}],
        4: [status, *busy(second), {"die": second}],
        5: [
            status,
            {"command": "drain", "member": third},
            {"command": "add", "address": first},
            drain,
        ],
    }
    (tmp_path / "acts.json").write_text(json.dumps(acts))
    train(config)

    lines = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    answers: dict[int, list[Any]] = {step: [] for step in range(1, STEPS)}
    for line in lines:
        answers[line["step"]].append(line["answer"])

    def replicas(step: int) -> dict[str, str]:
        members = answers[step][0]["members"]
        assert {member["weight_version"] for member in members} == {step}
        return {member["address"]: member["state"] for member in members}

    assert replicas(2) == {first: "current", second: "current"}
    assert [answer["state"] for answer in answers[2][1:]] == ([] if ahead else ["drained"])
    assert replicas(3) == {second: "current"}
    assert replicas(4) == {second: "current", third: "current"}
    assert replicas(5) == {third: "current"}
    last, dead, unknown = (answer["refused"] for answer in answers[5][1:])
    assert "the last of" in last
    assert f"no server answers at {first}" in dead
    assert f"no replica '{first}'" in unknown

    run = tmp_path / "runs" / "tests" / "run"
    store = CheckpointStore(run / "checkpoints")
    latest = store.latest()
    assert latest is not None
    assert latest.name == f"step_{STEPS}"
    ledger = Ledger()
    ledger.load_state(json.loads((latest / "state.json").read_text())["ledger"])
    ledger.check()
    assert (ledger.counts()["used"], ledger.counts()["dropped"]) == (EPOCHS * PROMPTS, {})
    files = [run / f"samples/step_{step}.jsonl" for step in range(1, STEPS + 1)]
    rows = [json.loads(row) for file in files for row in file.open(encoding="utf-8")]
    assert set(Counter(row["sample_id"] for row in rows).values()) == {1}
    assert len(rows) == EPOCHS * PROMPTS * N

    events = map(json.loads, (run / "events.jsonl").open(encoding="utf-8"))
    tried = [e["replicas"] for e in events if e["event"] == "rollout_replicas_started_again"]
    assert tried == [[1]]  # the one that was killed, and not the one that was drained and ended

    weights = {n: w for f in latest.glob("actor/weights/*.safetensors") for n, w in load_file(f).items()}  # fmt: skip
    with urlopen(third + "/digest") as found:
        assert found.read().decode() == digest_of(weights)

    check_policy(run)
    shown = CliRunner().invoke(main, ["pool", "status", str(run)])
    assert shown.exit_code == 0, shown.output
    assert "under way" in shown.stdout
    assert "completed" in shown.stdout
    refused = CliRunner().invoke(main, ["pool", "add", str(run), first])
    assert refused.exit_code == 2
    assert f"dovetail resume {run}" in refused.output
