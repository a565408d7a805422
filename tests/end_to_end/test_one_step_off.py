"""A trainer that generates one step ahead, in processes that are stopped, killed or lose their engine: no sample is lost or doubled."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from run_files import lines_of, steps_of
from safetensors.torch import load_file

from dovetail.checkpoint.store import CheckpointStore
from dovetail.data.ledger import Ledger

HERE = Path(__file__).parent
KIT = HERE / "stage_packages" / "stagekit" / "src"
N, PROMPTS = 4, 12
REWARD = """
import time
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while ground_truth == {held!r} and not Path({scored!r}).with_name("released").exists():
        time.sleep(0.01)
    with open({scored!r}, "a") as file:
        file.write("scored\\n")
    if ground_truth == {refused!r}:
        raise ValueError("this one can't be scored")
    return sum(c.isalpha() for c in solution_str) / 50
"""
LATE = """
import time
from pathlib import Path

import numpy as np
from dovetail.interfaces import Stage

COLUMNS = ("prompt_ids", "response_ids", "rollout_log_probs", "token_weight_versions")
HERE = Path(__file__).parent


class Late(Stage):
    name = "late"
    api = ">=1.0,<2"
    phase = "transform"

    @classmethod
    def requires(cls, config, facts):
        return frozenset(COLUMNS)

    def run(self, batch, step):
        while len((HERE / "scored").read_text().splitlines()) < 16 * min(step.number + 1, 3):
            time.sleep(0.01)
        time.sleep(0.1)
        columns = {name: np.array([*batch[name]], dtype=object) for name in COLUMNS}
        asked = len((HERE / "asked.jsonl").read_text().splitlines())
        np.savez(HERE / f"step_{step.number}.npz", asked=asked, **columns)
        return batch
"""
LEARNING = """
import time
from pathlib import Path

from dovetail.interfaces import Stage

HERE = Path(__file__).parent


class Learning(Stage):
    name = "learning"
    api = ">=1.0,<2"
    phase = "transform"

    def run(self, batch, step):
        if step.number == 2:
            (HERE / "learning").touch()
            while not (HERE / "left").exists():  # until the engine has left
                time.sleep(0.01)
        return batch
"""
KILLER = """
import os
import signal
import time
from pathlib import Path

import psutil
from dovetail.interfaces import Stage

HERE = Path(__file__).parent


class Killer(Stage):
    name = "killer"
    api = ">=1.0,<2"
    phase = "transform"

    def run(self, batch, step):
        ours = psutil.Process().children(recursive=True) if step.number == 3 else []
        while ours and not all((HERE / f"holds-{prompt}").exists() for prompt in (6, 7)):
            time.sleep(0.01)
        time.sleep(0.2)  # what was generated before has arrived
        replicas = [p for p in ours if " ".join(p.cmdline()).startswith("ray::rollout")]
        for replica in replicas:
            os.kill(replica.pid, signal.SIGKILL)
        step.metrics["killer/killed"] = float(len(replicas))
        return batch
"""


@pytest.fixture
def ahead(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, ...]]:
    """A function that writes the config of a run one step ahead, with the lives of its engine; returns how it is trained."""
    monkeypatch.setenv("PYTHONPATH", str(KIT), prepend=":")

    def write(
        *lives: dict[str, Any], refused: str = "", held: str = "", **overrides: Any
    ) -> tuple[str, ...]:
        document = yaml.safe_load(config.read_text())
        scored = str(tmp_path / "scored")
        reward = REWARD.format(scored=scored, refused=refused, held=held)
        (tmp_path / "my_reward.py").write_text(reward)
        document["rollout"] = {
            "path": str(HERE / "watched_rollout.py"),
            "attribute": "WatchedRollout",
            "n": N,
            "folder": str(tmp_path),
            "lives": list(lives),
        }
        trainer = {
            "path": str(KIT / "stagekit" / "one_step_off.py"),
            "attribute": "OneStepOff",
            "validate_before": False,
            "validate_after": False,
        }
        document["trainer"] |= trainer
        document["data"] |= {"sampler": "sequential", "val_files": []}
        config.write_text(yaml.safe_dump(document))
        return ("train", str(config), *(f"{key}={value}" for key, value in overrides.items()))

    return write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of the run."""
    return tmp_path / "runs" / "tests" / "run"


def until(there: Callable[[], bool], command: Any) -> None:
    """Wait for it while the command runs."""
    while not there() and not command.ended:
        time.sleep(0.01)


def count(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def latest(run: Path) -> Path:
    """The latest checkpoint, which is sound."""
    store = CheckpointStore(run / "checkpoints")
    found = store.latest()
    assert found is not None
    store.verify(found)
    return found


def check_whole(run: Path, *, steps: int, epochs: int = 1, dropped: int = 0) -> None:
    """Every prompt was used once in each epoch, or dropped with a reason; no sample is lost or there twice."""
    assert [row["step"] for row in steps_of(run)] == list(range(1, steps + 1))
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    ledger = Ledger()
    ledger.load_state(json.loads((latest(run) / "state.json").read_text())["ledger"])
    ledger.check()
    counts = ledger.counts()
    assert counts["used"] == epochs * (PROMPTS - dropped)
    assert sum(counts["dropped"].values()) == epochs * dropped
    assert all(counts["dropped"])
    rows = [row for n in range(1, steps + 1) for row in lines_of(run / f"samples/step_{n}.jsonl")]
    names = Counter(row["sample_id"] for row in rows)
    assert set(names.values()) == {1}
    prompts = Counter(tuple(name.split(".")[1:3]) for name in names)
    assert prompts == {(f"e{e}", f"p{p}"): N for e in range(epochs) for p in range(PROMPTS)}


# -- samples that are there before they are wanted -------------------------------------------------


def log_probs(weights: Path, model: Any, prompt: Any, response: Any) -> np.ndarray:
    """Log-probabilities of the response's tokens, by transformers alone."""
    import torch

    missing = model.load_state_dict(load_file(weights), strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    ids = torch.tensor([[*prompt, *response]], dtype=torch.long)
    with torch.no_grad():
        found = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return found.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_samples_that_are_finished_before_the_update_are_one_version_old_and_so_are_their_numbers(
    dovetail: Callable[..., Any],
    ahead: Callable[..., tuple[str, ...]],
    run: Path,
    tiny: Path,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "late.py").write_text(LATE)
    stages = f"[{{path: {tmp_path}/late.py, attribute: Late}}]"
    dovetail(*ahead(**{"algorithm.stages": stages}))
    check_whole(run, steps=3)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    [initial] = tiny.glob("*.safetensors")
    saved = [run / f"checkpoints/step_{n}/actor/weights" for n in (1, 2)]
    versions = [initial, *(next(folder.glob("*.safetensors")) for folder in saved)]
    asked = [line["prompt"] for line in lines_of(tmp_path / "asked.jsonl")]
    assert sorted(asked) == list(range(PROMPTS))
    for step, made_by, metrics in zip((1, 2, 3), (1, 1, 2), steps_of(run), strict=True):
        batch = np.load(tmp_path / f"step_{step}.npz", allow_pickle=True)
        # The step found the next one's samples finished, and nothing else was asked for before its update.
        assert batch["asked"] == min(4 * (step + 1), PROMPTS)
        assert set(np.concatenate(batch["token_weight_versions"])) == {made_by}
        assert (
            metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == step - made_by
        )
        texts = list(zip(batch["prompt_ids"], batch["response_ids"], strict=True))
        then_T, now_T = (
            np.concatenate([log_probs(versions[v - 1], model, *text) for text in texts])
            for v in (made_by, step)
        )
        rollout_T = np.concatenate(batch["rollout_log_probs"]).astype(float)
        assert rollout_T == pytest.approx(then_T, abs=1e-4)
        ratio = float(np.exp(now_T - then_T).mean())
        assert metrics["actor/ratio_mean"] == pytest.approx(ratio, abs=1e-4)
        assert (abs(ratio - 1) > 1e-4) == (made_by < step)


# -- stops, and services that die ------------------------------------------------------------------


def test_a_stop_while_samples_are_waited_for_and_an_engine_that_leaves_lose_nothing(
    start: Callable[..., Any],
    dovetail: Callable[..., Any],
    ahead: Callable[..., tuple[str, ...]],
    run: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "learning.py").write_text(LEARNING)
    stages = f"[{{path: {tmp_path}/learning.py, attribute: Learning}}]"
    settings = {"algorithm.stages": stages}
    command = start(*ahead({}, {"leaves": 11}, held="4", **settings))  # prompts 7 and 10
    until((run / "checkpoints" / "step_1").exists, command)
    time.sleep(0.3)  # now the trainer waits for the score of prompt 7
    command.send(signal.SIGINT)
    time.sleep(0.3)
    (tmp_path / "released").touch()
    stopped = command.wait()
    assert stopped.returncode == 130, stopped.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    assert latest(run).name == "step_1"
    before = lines_of(tmp_path / "asked.jsonl")
    assert sorted(line["prompt"] for line in before) == list(range(8))

    left = dovetail("resume", str(run), check=False)
    assert left.returncode == 75, left.stdout
    assert "event loop" in left.stderr
    assert "engine has left" in left.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert latest(run).name == "step_2"
    between = [line["prompt"] for line in lines_of(tmp_path / "asked.jsonl")[8:]]
    # What was generated when the run was stopped is scored, and not asked for again.
    assert sorted(between) == [8, 9, 10, 11]

    dovetail("resume", str(run))
    check_whole(run, steps=3)


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "kills", "epochs"),
    [(1, 2, 1), *(pytest.param(seed, 12, 3, marks=pytest.mark.nightly) for seed in (2, 3, 4))],
)
def test_runs_that_are_killed_at_random_moments_use_every_prompt_once(
    start: Callable[..., Any],
    ahead: Callable[..., tuple[str, ...]],
    run: Path,
    tmp_path: Path,
    seed: int,
    kills: int,
    epochs: int,
) -> None:
    draw = random.Random(seed)
    scored = tmp_path / "scored"
    settings = {
        "data.train_batch_size": 2,
        "trainer.total_epochs": epochs,
        "reward.max_failure_share": 0.5,
    }
    args = ahead(*[{"pause": 0.08}] * 99, refused="3", **settings)
    killed = 0
    for _ in range(kills):
        done = killed_after(1 + draw.randrange(2 * 2 * N), start(*args), run, scored)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        latest(run)
        args = ("resume", str(run))
    else:
        done = start(*args).wait()
        assert done.returncode == 0, done.stderr
    assert killed >= kills / 4  # the run may end before the others
    check_whole(run, steps=6 * epochs, epochs=epochs, dropped=3)
    assert count(tmp_path / "asked.jsonl") > PROMPTS * epochs  # some were in flight


def killed_after(samples: int, command: Any, run: Path, scored: Path) -> Any:
    """Kill a command when so many samples were scored since there was a checkpoint; it may end before."""
    until((run / "checkpoints" / "step_1").exists, command)
    wanted = count(scored) + samples
    until(lambda: count(scored) >= wanted, command)
    command.send(signal.SIGKILL)
    return command.wait()


@pytest.mark.ray
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_on_ray_replicas_that_are_killed_while_weights_are_sent_and_while_a_step_learns_are_brought_back(
    dovetail: Callable[..., Any],
    ahead: Callable[..., tuple[str, ...]],
    run: Path,
    tmp_path: Path,
    replicas: int,
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    settings = {
        "runtime.name": "ray",
        "rollout.replicas": replicas,
        "data.train_batch_size": 2,
        "algorithm.stages": f"[{{path: {tmp_path}/killer.py, attribute: Killer}}]",
    }
    # Those that run while a step learns have one sample that has come, and others that have not.
    lives = ({"dies_at": 2}, {"holds": [6, 7]})
    dovetail(*ahead(*lives, **settings))
    check_whole(run, steps=6)
    steps = steps_of(run)
    assert [row["killer/killed"] for row in steps] == [0, 0, replicas, 0, 0, 0]
    rebuilds = [row.get("rollout/restarts", 0) for row in steps]
    assert rebuilds == [replicas, 0, replicas, 0, 0, 0]
    # A checkpoint interrupts running responses. Each continues as a request of one sample, or before its first token as it was.
    lines = [line for line in lines_of(tmp_path / "asked.jsonl") if line["samples"] > 1]
    asked = Counter((line["prompt"], line["samples"]) for line in lines)
    again = [asked.pop((prompt, N - 1)) for prompt in (6, 7)]
    assert asked == Counter((prompt, N) for prompt in range(PROMPTS))
    assert {*again} <= {1, 2}
    assert [row["rollout/staleness_max"] for row in steps] == [0, 1, 1, 1, 1, 1]
