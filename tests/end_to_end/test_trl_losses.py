"""Losses and gradients of preferences equal TRL's on the same tokens; TRL runs in an environment of its own (`make .venv-trl/.ready`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

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
    *(
        Case(
            name=loss,
            objective="dpo",
            ours={"beta": 0.3, "loss": loss},
            theirs={"beta": 0.3, "loss_type": [theirs]},
        )
        for loss, theirs in (
            ("hinge", "hinge"),
            ("nca", "nca_pair"),
            ("bco", "bco_pair"),
            ("apo_zero", "apo_zero"),
            ("apo_down", "apo_down"),
            ("sppo_hard", "sppo_hard"),
            ("discopop", "discopop"),
        )
    ),
    Case(
        name="exo",
        objective="dpo",
        ours={"beta": 0.3, "loss": "exo", "label_smoothing": 0.01},
        theirs={"beta": 0.3, "loss_type": ["exo_pair"], "label_smoothing": 0.01},
    ),
    *(
        Case(
            name=ours,
            objective="dpo",
            ours={"beta": 0.3, "f_divergence": ours, "f_alpha": 0.4},
            theirs={
                "beta": 0.3,
                "f_divergence_type": theirs,
                "f_alpha_divergence_coef": 0.4,
            },
        )
        for ours, theirs in (
            ("forward_kl", "forward_kl"),
            ("js", "js_divergence"),
            ("alpha", "alpha_divergence"),
        )
    ),
    Case(
        name="ld",
        objective="dpo",
        ours={"beta": 0.3, "ld_alpha": 0.4},
        theirs={"beta": 0.3, "ld_alpha": 0.4},
    ),
    Case(
        name="cpo",
        objective="cpo",
        ours={"beta": 0.3, "nll_coef": 0.5},
        trainer="cpo",
        theirs={"beta": 0.3, "cpo_alpha": 0.5},
    ),
    Case(
        name="cpo_hinge",
        objective="cpo",
        ours={"beta": 0.3, "loss": "hinge"},
        trainer="cpo",
        theirs={"beta": 0.3, "loss_type": "hinge", "cpo_alpha": 1.0},
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
    Case(name="reward", objective="bradley_terry", trainer="reward"),
    Case(
        name="reward_margin",
        objective="bradley_terry",
        ours={"margin": True},
        trainer="reward",
    ),
    Case(
        name="reward_margin_centred",
        objective="bradley_terry",
        ours={"margin": True, "center_coef": 0.1},
        trainer="reward",
        theirs={"center_rewards_coefficient": 0.1},
    ),
]


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of random tokens of mixed lengths after a prompt of one, with a margin."""
    rng = np.random.default_rng(seed)

    def ids(least: int, most: int) -> list[int]:
        return rng.integers(5, 300, rng.integers(least, most)).tolist()

    return [
        {
            "prompt_ids": ids(1, 2),
            "chosen": ids(2, 9),
            "rejected": ids(2, 9),
            "margin": number / 2,
        }
        for number in range(5)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A policy and its reference, which differ, and a reward model."""
    where = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference", "reward")):
        (where / name).mkdir()
        tokenizer = tiny_tokenizer(where / name, vocab_size=300)
        head = "value" if name == "reward" else "lm"
        tiny_model(where / name, tokenizer, seed=seed + 1, head=head)
    return where / "policy", where / "reference", where / "reward"


@pytest.fixture(scope="module")
def theirs(
    models: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, torch.Tensor]]:
    """Loss and gradients of a case, by TRL."""
    if not TRL.exists():
        pytest.skip("needs an environment with TRL: make .venv-trl/.ready")
    where = tmp_path_factory.mktemp("trl")
    cases = [
        {
            "name": c.name,
            "trainer": c.trainer,
            "settings": c.theirs,
            "margin": c.ours.get("margin", False),
        }
        for c in CASES
    ]
    names = ("model", "reference", "reward_model")
    request = dict(zip(names, map(str, models), strict=True)) | {"rows": rows(), "cases": cases}
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


def engine(model: Path, head: Literal["lm", "value"] = "lm") -> Any:
    """A started engine that takes plain gradient steps of rate 1."""
    context = PluginContext(
        role="actor",
        head=head,
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
            "margin": np.repeat(np.array([p["margin"] for p in pairs], np.float32), 2),
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


def closed(batch: Batch) -> Batch:
    """The batch with a further token after each response, whose value is the score: that of all tokens before it."""
    responses = [np.append(ids, 5) for ids in batch["response_ids"]]
    masks = [np.arange(len(ids)) == len(ids) - 1 for ids in responses]
    return batch.with_columns(
        {
            "response_ids": Ragged.from_list(responses, np.int64),
            "response_mask": Ragged.from_list(masks, np.bool_),
        }
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient_are_those_of_trl(
    case: Case, models: tuple[Path, Path, Path], theirs: Any, tmp_path: Path
) -> None:
    expected = theirs(case.name)
    if case.trainer == "reward":
        start = models[2]
        trained = engine(start, "value")
        batch = closed(batch_of(rows()))
    else:
        start = models[0]
        trained, reference = engine(start), engine(models[1])
        batch = scored(batch_of(rows()), trained, reference)
        reference.close()
    metrics = values(trained.update(batch, objective_spec(case.objective, **case.ours)))
    trained.export(tmp_path / "after")
    trained.close()
    loss = expected.pop("loss").item()
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
    before, after = (load_file(p / "model.safetensors") for p in (start, tmp_path / "after"))
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(
            before[name] - after[name], gradient, rtol=1e-4, atol=1e-5, msg=name
        )
