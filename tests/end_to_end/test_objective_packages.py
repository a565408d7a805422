"""A package outside of the tree brings an objective of pairs: engines train with it, and keep its pairs together."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.batch import Batch, Ragged
from dovetail.config import load_config
from dovetail.dispatch import Mesh
from dovetail.errors import ColumnError
from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.metrics import values
from dovetail.plugins import load_plugin_class, make_plugin, objective_spec
from dovetail.plugins.index import default_index
from dovetail.run.run import train
from dovetail.sections import ModelSection, OptimSection, PluginSection, TrainingSection
from dovetail_demo.data import needs_carry, problems
from dovetail_demo.prepare import prepare
from dovetail_demo.warm_start import worked_answer
from dovetail_sdk.testing import ProcessRanks

BETA = 0.5
PAIRS = 7
LOG_PROBS = frozenset({"log_probs"})
SGD = OptimSection(name="sgd", lr=0.5, weight_decay=0.0)


@pytest.fixture(scope="module")
def site(install_wheel: Callable[[Path], Path]) -> Path:
    """A folder in which the wheel of the package is installed."""
    return install_wheel(Path(__file__).parent / "objective_packages" / "dpokit")


@pytest.fixture(autouse=True)
def visible(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process and those that it starts see the package."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(site))
    default_index.cache_clear()
    yield
    default_index.cache_clear()


def pairs(seed: int = 0) -> Batch:
    """Pairs of responses to one prompt each, of mixed lengths, in mixed order; some tokens are masked."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 300, rng.integers(1, 9)) for _ in range(PAIRS)] * 2
    responses = [rng.integers(5, 300, rng.integers(2, 14)) for _ in range(2 * PAIRS)]
    mask = Ragged.from_list([rng.random(len(r)) < 0.8 for r in responses], np.bool_)
    tokens = len(mask.values)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(prompts, np.int64),
            "response_ids": Ragged.from_list(responses, np.int64),
            "response_mask": mask,
            "temperature": np.ones(2 * PAIRS, np.float32),
            "ref_log_probs": mask.with_values(rng.uniform(-7, -5, tokens).astype(np.float32)),
            "pair_id": np.tile(np.arange(PAIRS), 2),
            "chosen": np.repeat([True, False], PAIRS),
            "sample_id": [f"s{row}" for row in range(2 * PAIRS)],
        }
    ).take(rng.permutation(2 * PAIRS))


def engine_and_mesh(name: str, ranks: int) -> tuple[PluginRef, Mesh]:
    """fsdp2, or Megatron with what its tests put in CUDA's place; every rank gets samples of its own."""
    if name == "fsdp2":
        return PluginRef(kind="engine", name=name), Mesh(dp=ranks)
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    pytest.importorskip("mbridge", reason="needs mbridge")
    from dovetail_train_megatron.config import MegatronConfig

    root = Path(__file__).parents[2]
    stand_in = root / "plugins" / "train_megatron" / "tests" / "cuda_stand_in.py"
    config = MegatronConfig(name=name)
    plugin = PluginRef(
        kind="engine",
        name="MegatronOnCpu",
        path=str(stand_in),
        attribute="MegatronOnCpu",
        config=config,
    )
    load_plugin_class(plugin)  # Ranks answer with the class, by the name of its module.
    return plugin, Mesh.over(ranks, **config.mesh_axes())


def step(
    ranks: ProcessRanks, tiny: Path, name: str, budget: int, to: Path, make: Callable[[Any], Any]
) -> dict[str, torch.Tensor]:
    """The weights after `make` has updated an engine once."""
    plugin, mesh = engine_and_mesh(name, ranks.world)
    context = PluginContext(
        role="actor",
        seed=1,
        model=ModelSection(path=str(tiny), dtype="float32"),
        training=TrainingSection(optim=SGD, grad_clip=0.0, max_tokens_per_micro_batch=budget),
        total_steps=1,
    )
    group: Any = ranks.worker_group(WorkerSpec(role="actor", plugin=plugin, context=context), mesh)
    try:
        make(group)
        group.export(to).result()
    finally:
        group.close()
    return load_file(to / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "world", "budget"),
    [
        ("fsdp2", 1, 4096),
        ("fsdp2", 1, 24),
        ("fsdp2", 2, 48),
        ("fsdp2", 3, 4096),
        ("megatron", 2, 48),
    ],
)
def test_one_step_is_that_of_the_oracle_however_pairs_are_cut(
    tiny: Path, tmp_path: Path, name: str, world: int, budget: int
) -> None:
    """The gradient by every log-probability is the oracle's: a policy gradient with its negative as advantages takes the same step."""
    from dpokit.oracle import dpo

    batch, found = pairs(), {}

    def of_pairs(group: Any) -> None:
        before = group.forward(batch, LOG_PROBS).result()["log_probs"].values
        found["loss"], found["gradient"] = dpo(batch, before, BETA)
        metrics = values(group.update(batch, objective_spec("kit_dpo", beta=BETA)).result())
        assert metrics["dpo/loss"] == pytest.approx(found["loss"], rel=1e-5)

    def of_tokens(group: Any) -> None:
        gradient_T = batch["response_mask"].with_values(-found["gradient"].astype(np.float32))
        objective = objective_spec(
            "policy",
            policy_loss=PluginSection(name="reinforce"),
            loss_aggregation=PluginSection(name="token_sum"),
        )
        group.update(batch.with_columns({"advantages": gradient_T}), objective).result()

    with ProcessRanks(world) as ranks:
        after = step(ranks, tiny, name, budget, tmp_path / "pairs", of_pairs)
        expected = step(ranks, tiny, name, budget, tmp_path / "tokens", of_tokens)
    assert abs(found["gradient"]).max() > 1e-3
    for weight, tensor in expected.items():
        torch.testing.assert_close(after[weight], tensor, rtol=1e-4, atol=2e-6, msg=weight)
    before = load_file(tiny / "model.safetensors")
    assert any((after[weight] - before[weight]).abs().max() > 1e-3 for weight in after)


def test_half_a_pair_is_refused(tiny: Path, tmp_path: Path) -> None:
    with ProcessRanks(1) as ranks, pytest.raises(ColumnError, match="one chosen and one rejected"):
        step(
            ranks,
            tiny,
            "fsdp2",
            4096,
            tmp_path / "half",
            lambda group: group.update(pairs().slice(0, 5), objective_spec("kit_dpo")).result(),
        )


def test_a_run_trains_it_on_a_datasets_pairs(tiny: Path, tmp_path: Path) -> None:
    """Nothing but the config names the package: no reward, no rollout."""
    rows = [
        {"prompt": f"{a} + {b}?", "chosen": f"{a + b}, gladly", "rejected": f"{a + b}, no"}
        for a in range(4)
        for b in range(4)
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {"train_files": str(data), "train_batch_size": 8, "max_response_length": 16},
        "actor": {"objective": "kit_dpo", "optim": {"lr": 1e-2}, "mini_batch_size": 4},
        "trainer": {"name": "supervised", "examples": "preferences", "total_epochs": 3},
        "tracking": ["jsonl"],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    summary = train(tmp_path / "config.yaml")
    lines = (Path(summary["directory"]) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["dpo/loss"] for line in lines if "dpo/loss" in line]
    # Two updates a step: the second one's margins are not 0 any more.
    assert losses[0] == pytest.approx(np.log(2), abs=0.2)
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["fsdp2", "{name: fsdp2, lora: {rank: 16}}"])
def test_the_demos_model_learns_to_prefer_right_answers(tmp_path: Path, engine: str) -> None:
    """Its warm start prefers answers that forget the carry; held-out answers are judged by transformers."""
    demo = tmp_path / "seed_1"
    warm = prepare(demo, 1)

    def answers(pair: tuple[int, int]) -> list[str]:
        return [worked_answer(*pair, carries=carries) for carries in (True, False)]

    shown, held_out = ([p for p in part if needs_carry(*p)] for part in problems(1))
    columns = ("prompt", "chosen", "rejected")
    rows = [dict(zip(columns, (f"{a}+{b}=?", *answers((a, b))), strict=True)) for a, b in shown]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(warm), "dtype": "float32"},
        "data": {
            "train_files": str(tmp_path / "pairs.jsonl"),
            "train_batch_size": 64,
            "max_prompt_length": 64,
            "max_response_length": 64,
        },
        "actor": {"engine": yaml.safe_load(engine), "objective": "kit_dpo", "optim": {"lr": 1e-3}},
        "trainer": {"name": "supervised", "examples": "preferences", "total_steps": 60},
        "tracking": ["jsonl"],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    run = Path(train(tmp_path / "config.yaml")["directory"])
    plugin = PluginRef(
        kind="engine", name="fsdp2", config=load_config(run / "config.yaml").config.actor.engine
    )
    context = PluginContext(role="actor", model=ModelSection(path=str(warm), dtype="float32"))
    trained: Any = make_plugin(plugin, context)
    trained.start()
    try:
        trained.load(run / "checkpoints" / "step_60" / "actor")
        trained.export(tmp_path / "trained")
    finally:
        trained.close()

    def preferred(directory: Path) -> float:
        """The share of held-out problems whose right answer is likelier than the wrong one."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(warm)
        won = 0
        for a, b in held_out[:64]:
            turns = [{"role": "user", "content": f"{a}+{b}=?"}]
            start = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            likely = []
            for answer in answers((a, b)):
                whole = tokenizer(start + answer, add_special_tokens=False, return_tensors="pt")
                logits = model(**whole).logits[0, :-1].log_softmax(-1)
                log_probs = logits.gather(1, whole["input_ids"][0, 1:, None])
                likely.append(log_probs[len(tokenizer(start)["input_ids"]) - 1 :].sum().item())
            won += likely[0] > likely[1]
        return won / 64

    assert preferred(warm) < 0.3
    assert preferred(tmp_path / "trained") > 0.95


def test_the_check_finds_its_suite(dovetail: Callable[..., Any]) -> None:
    done: subprocess.CompletedProcess[str] = dovetail(
        "plugins", "check", "objective/kit_dpo", "--json", check=False
    )
    report = json.loads(done.stdout)
    left = [item for item in (*report["checks"], *report["tests"]) if item["outcome"] == "failed"]
    assert left == []
    ran = {
        item["name"].partition("[")[0] for item in report["tests"] if item["outcome"] == "passed"
    }
    assert any("oracle" in name for name in ran)
