"""Supervised steps of a training engine on two processes that gloo joins: metrics of every step, then its training state.

    python records/ranks.py fsdp2|megatron --prepared DIR --out DIR --steps 10

The engine is driven as a runtime drives it, by `ProcessRanks`; Megatron divides every weight over both ranks, on the CPU with what its
tests put in CUDA's place. The batches are those of the demo's warm start, with a KL term and an entropy bonus besides.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scenarios import MEGATRON_ON_CPU

sys.path.insert(0, str(MEGATRON_ON_CPU.parent))

from transformers import AutoTokenizer

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Mesh
from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.metrics import values
from dovetail.plugins import load_plugin_class, objective_spec
from dovetail.sections import ModelSection, OptimSection, PluginSection, TrainingSection
from dovetail_demo.warm_start import BATCH_SIZE, demonstrations
from dovetail_sdk.testing.processes import ProcessRanks

RANKS = 2


def engine_and_mesh(name: str) -> tuple[PluginRef, Mesh]:
    """Which engine it is, and what its ranks divide."""
    if name == "fsdp2":
        from dovetail_train_fsdp2.config import Fsdp2Config

        return PluginRef(kind="engine", name=name, config=Fsdp2Config(name=name)), Mesh(dp=RANKS)
    from dovetail_train_megatron.config import MegatronConfig

    config = MegatronConfig(name=name, tensor_parallel_size=RANKS)
    plugin = PluginRef(
        kind="engine",
        name="MegatronOnCpu",
        path=str(MEGATRON_ON_CPU),
        attribute="MegatronOnCpu",
        config=config,
    )
    load_plugin_class(plugin)  # Ranks answer with the class, by the name of its module.
    return plugin, Mesh.over(RANKS, **config.mesh_axes())


def batch_of(tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Batch:
    """A mini-batch of worked answers, with advantages of 1."""
    texts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], tokenize=False, add_generation_prompt=True
    )
    answers = [row["response"] + tokenizer.eos_token for row in rows]
    prompts, responses = (
        Ragged.from_list(tokenizer(part, add_special_tokens=False)["input_ids"], np.int64)
        for part in (texts, answers)
    )
    return Batch(
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "response_mask": responses.with_values(np.ones(len(responses.values), np.bool_)),
            "temperature": np.ones(len(rows), np.float32),
            "advantages": np.ones(len(rows), np.float32),
        }
    )


def with_reference(batch: Batch) -> Batch:
    """The batch with log-probabilities of a reference: made up, the same for all."""
    mask = batch["response_mask"]
    column = mask.with_values(np.full(len(mask.values), -1.0, np.float32))
    return batch.with_columns({"ref_log_probs": column})


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("fsdp2", "megatron"))
    parser.add_argument("--prepared", type=Path, required=True, help="model and data")
    parser.add_argument("--out", type=Path, required=True, help="directory")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    plugin, mesh = engine_and_mesh(arguments.engine)
    model = arguments.prepared / "model"
    context = PluginContext(
        role="actor",
        seed=1,
        model=ModelSection(path=str(model), dtype="float32"),
        training=TrainingSection(
            max_tokens_per_micro_batch=1024, optim=OptimSection(name="adamw", lr=1e-3)
        ),
        total_steps=arguments.steps,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    rows_of_steps = demonstrations(
        arguments.prepared / "data" / "train.parquet", 1, steps=arguments.steps
    )
    batches = (
        batch_of(tokenizer, rows_of_steps[start : start + BATCH_SIZE])
        for start in range(0, len(rows_of_steps), BATCH_SIZE)
    )
    objective = objective_spec(
        "policy",
        policy_loss=PluginSection(name="reinforce"),
        kl="k3",
        entropy=True,
        scalars={"kl_coef": 0.1, "entropy_coef": 0.01},
    )
    rows: list[dict[str, Any]] = []
    with ProcessRanks(RANKS) as ranks:
        group: Any = ranks.worker_group(
            WorkerSpec(role="actor", plugin=plugin, context=context), mesh
        )
        for step in range(1, arguments.steps + 1):
            metrics = group.update(with_reference(next(batches)), objective).result()
            rows.append({"step": step, **values(metrics)})
        checkpoint = arguments.out / "checkpoints" / f"step_{arguments.steps}" / "actor"
        checkpoint.mkdir(parents=True)
        group.save(checkpoint).result()
        group.close()
    lines = [json.dumps(row) + "\n" for row in rows]
    (arguments.out / "metrics.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
