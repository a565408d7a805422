"""Engines train with an objective of pairs, and keep its pairs together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Mesh
from dovetail.errors import ColumnError
from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.metrics import values
from dovetail.plugins import load_plugin_class, objective_spec
from dovetail.sections import ModelSection, OptimSection, PluginSection, TrainingSection
from dovetail_sdk.testing import ProcessRanks

BETA = 0.5
PAIRS = 7
LOG_PROBS = frozenset({"log_probs"})
SGD = OptimSection(name="sgd", lr=0.5, weight_decay=0.0)


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


def dpo(batch: Batch, log_probs_T: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the loss by the formula of arXiv 2305.18290, pair by pair, and its gradient by the log-probabilities, float64 [T]."""
    mask, ref_T = batch["response_mask"], batch["ref_log_probs"].values.astype(np.float64)
    chosen_N, pair_N = batch["chosen"], batch["pair_id"]
    away_T = np.where(mask.values, log_probs_T.astype(np.float64) - ref_T, 0)
    rewards_N = [float(row.sum()) for row in mask.with_values(away_T)]
    loss, slopes_N = 0.0, np.zeros(len(mask))
    for pair in range(PAIRS):
        (better,) = np.flatnonzero((pair_N == pair) & chosen_N)
        (worse,) = np.flatnonzero((pair_N == pair) & ~chosen_N)
        margin = BETA * (rewards_N[better] - rewards_N[worse])
        loss += np.log1p(np.exp(-margin)) / PAIRS
        slopes_N[better] = -BETA / (1 + np.exp(margin)) / PAIRS
        slopes_N[worse] = -slopes_N[better]
    return loss, np.where(mask.values, np.repeat(slopes_N, mask.lengths), 0)


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
    batch, found = pairs(), {}

    def of_pairs(group: Any) -> None:
        before = group.forward(batch, LOG_PROBS).result()["log_probs"].values
        found["loss"], found["gradient"] = dpo(batch, before)
        metrics = values(group.update(batch, objective_spec("dpo", beta=BETA)).result())
        assert metrics["actor/loss"] == pytest.approx(found["loss"], rel=1e-5)

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
    with ProcessRanks(1) as ranks, pytest.raises(ColumnError, match="pair_id 0 has 1 chosen"):
        step(
            ranks,
            tiny,
            "fsdp2",
            4096,
            tmp_path / "half",
            lambda group: group.update(pairs().slice(0, 5), objective_spec("dpo")).result(),
        )
