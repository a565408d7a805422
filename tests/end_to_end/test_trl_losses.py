"""Losses and gradients of preferences equal TRL's on the same tokens; TRL runs in an environment of its own (`make .venv-trl/.ready`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.metrics import values
from dovetail.plugins import make_plugin, objective_spec, plugin_section
from dovetail.sections import ModelSection, TrainingSection
from dovetail_sdk.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
TRL = ROOT / ".venv-trl" / "bin" / "python"
LOG_PROBS = frozenset({"log_probs"})


@attrs.frozen(kw_only=True)
class Case:
    """One objective, and the trainer of TRL that minimises the same."""

    name: str
    objective: str
    ours: dict[str, Any] = attrs.field(factory=dict)
    trainer: str = "dpo"
    theirs: dict[str, Any] = attrs.field(factory=dict)


CASES = [
    Case(name="dpo", objective="dpo", ours={"beta": 0.3}, theirs={"beta": 0.3}),
    Case(
        name="dpo_robust",
        objective="dpo",
        ours={"beta": 0.3, "label_smoothing": 0.2, "robust": True},
        theirs={"beta": 0.3, "label_smoothing": 0.2, "loss_type": ["robust"]},
    ),
    Case(
        name="dpo_nll",
        objective="dpo",
        ours={"beta": 0.3, "nll_coef": 0.5},
        theirs={"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    Case(
        name="ipo",
        objective="ipo",
        ours={"beta": 0.3},
        theirs={"beta": 0.3, "loss_type": ["ipo"]},
    ),
    Case(
        name="simpo",
        objective="simpo",
        ours={"beta": 2.0, "gamma": 0.6},
        trainer="cpo",
        theirs={"beta": 2.0, "simpo_gamma": 0.6, "loss_type": "simpo", "cpo_alpha": 0.0},
    ),
    # TRL's likelihood counts the prompt, too; prompts here are of one token, which is not predicted.
    Case(
        name="orpo",
        objective="orpo",
        ours={"beta": 0.4},
        trainer="orpo",
        theirs={"beta": 0.4},
    ),
    Case(
        name="kto",
        objective="kto",
        ours={"beta": 0.3, "desirable_weight": 1.5},
        trainer="kto",
        theirs={"beta": 0.3, "desirable_weight": 1.5},
    ),
]


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of random tokens of mixed lengths after a prompt of one."""
    rng = np.random.default_rng(seed)

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(5, 300, rng.integers(least, most)).tolist()

    return [{"prompt_ids": ids(1, 2), "chosen": ids(2, 9), "rejected": ids(2, 9)} for _ in range(5)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and its reference, which differ."""
    where = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference")):
        (where / name).mkdir()
        tiny_model(where / name, tiny_tokenizer(where / name, vocab_size=300), seed=seed + 1)
    return where / "policy", where / "reference"


@pytest.fixture(scope="module")
def theirs(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, torch.Tensor]]:
    """Loss and gradients of a case, by TRL."""
    if not TRL.exists():
        pytest.skip("needs an environment with TRL: make .venv-trl/.ready")
    where = tmp_path_factory.mktemp("trl")
    cases = [{"name": c.name, "trainer": c.trainer, "settings": c.theirs} for c in CASES]
    request = {"model": str(models[0]), "reference": str(models[1]), "rows": rows(), "cases": cases}
    (where / "request.json").write_text(json.dumps(request))
    script = Path(__file__).with_name("trl_losses.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [TRL, script, where / "request.json", where],
        capture_output=True,
        check=False,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return lambda name: load_file(where / f"{name}.safetensors")


def engine(model: Path) -> Any:
    """A started engine that takes plain gradient steps of rate 1."""
    context = PluginContext(
        role="actor",
        seed=1,
        model=ModelSection(path=str(model), dtype="float32"),
        training=TrainingSection(
            optim=plugin_section("optimizer", "sgd", lr=1.0, weight_decay=0.0), grad_clip=0.0
        ),
        total_steps=1,
    )
    made: Any = make_plugin(PluginRef(kind="engine", name="fsdp2"), context)
    made.start()
    return made


def batch_of(pairs: list[dict[str, Any]]) -> Batch:
    """Two rows a pair, the chosen one first."""
    responses = Ragged.from_list(
        [p[side] for p in pairs for side in ("chosen", "rejected")], np.int64
    )
    count = len(responses)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(
                [p["prompt_ids"] for p in pairs for _ in range(2)], np.int64
            ),
            "response_ids": responses,
            "response_mask": responses.with_values(np.ones(len(responses.values), bool)),
            "temperature": np.ones(count, np.float32),
            "pair_id": np.arange(count) // 2,
            "chosen": np.arange(count) % 2 == 0,
            "desirable": np.arange(count) % 2 == 0,
        }
    )


def scored(batch: Batch, policy: Any, reference: Any) -> Batch:
    """The batch with what stages make of it: the reference's log-probabilities, and ratios of the response before."""
    before = np.roll(np.arange(len(batch)), 1)
    other = batch.with_columns(batch.select(["response_ids", "response_mask"]).take(before).columns)
    found = [e.forward(other, LOG_PROBS)["log_probs"].sum() for e in (policy, reference)]
    return batch.with_columns(
        {
            "ref_log_probs": reference.forward(batch, LOG_PROBS)["log_probs"],
            "mismatched_log_ratios": (found[0] - found[1]).astype(np.float32),
        }
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient_are_those_of_trl(
    case: Case, models: tuple[Path, Path], theirs: Any, tmp_path: Path
) -> None:
    expected = theirs(case.name)
    policy, reference = (engine(path) for path in models)
    batch = scored(batch_of(rows()), policy, reference)
    metrics = values(policy.update(batch, objective_spec(case.objective, **case.ours)))
    policy.export(tmp_path / "after")
    for each in (policy, reference):
        each.close()
    loss = expected.pop("loss").item()
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
    before, after = (load_file(p / "model.safetensors") for p in (models[0], tmp_path / "after"))
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(
            before[name] - after[name], gradient, rtol=1e-4, atol=1e-5, msg=name
        )
