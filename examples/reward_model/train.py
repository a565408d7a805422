"""A reward model from preference pairs: the Bradley–Terry loss on the training engine's value head.

Every response is one text through the chat template, and its score is what the value head says after the last token of it.
What is written is a sequence classifier of one label, which `reward.manager: {name: reward_model, model: …}` scores with.
Usage: `python examples/reward_model/train.py --model demo/reward_model/base --train demo/reward_model/train.jsonl
--held-out demo/reward_model/held_out.jsonl --out demo/reward_model/model`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pairs import Pair, read_pairs

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.metrics import values
from dovetail.plugins import make_plugin, objective_spec
from dovetail.sections import ModelSection, OptimSection, PluginSection, TrainingSection
from dovetail_algorithms.objectives.bradley_terry import preference_scores

OBJECTIVE = objective_spec("bradley_terry")
Progress = Callable[[int, Mapping[str, float]], None]
"""Called after every step with its number, from 1, and its metrics."""


def to_batch(pairs: Sequence[Pair], tokenizer: Any) -> Batch:
    """The columns that the engine reads: N = 2P samples, a pair's chosen response before its rejected one.

    A value belongs to the state before its token. The whole text is therefore the prompt, and one closing token is the
    response: its value is the score of all that stands before it.
    """
    texts = [
        tokenizer.apply_chat_template(pair.conversation(response), tokenize=True, return_dict=False)
        for pair in pairs
        for response in (pair.chosen, pair.rejected)
    ]
    closing = Ragged.from_list([[tokenizer.eos_token_id or 0]] * len(texts), np.int64)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(texts, np.int64),
            "response_ids": closing,
            "response_mask": closing.with_values(np.ones(len(texts), np.bool_)),
            "temperature": np.ones(len(texts), np.float32),
            "pair_id": np.arange(len(texts)) // 2,
            "chosen": np.tile([True, False], len(pairs)),
        }
    )


def scores(engine: Any, batch: Batch) -> np.ndarray:
    """float32 [N]: what the model gives for each response now."""
    found = engine.forward(batch, frozenset({"values"}))["values"]
    return preference_scores(found, batch["response_mask"])


def accuracy(engine: Any, pairs: Sequence[Pair], tokenizer: Any) -> dict[str, float]:
    """How it does on these pairs: `accuracy`, the mean `margin` r_w − r_l, and the `loss`. A tie is half right."""
    chosen_P, rejected_P = scores(engine, to_batch(pairs, tokenizer)).reshape(-1, 2).T
    margins_P = chosen_P.astype(np.float64) - rejected_P
    right = (margins_P > 0) + 0.5 * (margins_P == 0)
    return {
        "accuracy": float(right.mean()),
        "margin": float(margins_P.mean()),
        "loss": float(np.logaddexp(0.0, -margins_P).mean()),
    }


def mini_batches(pairs: Sequence[Pair], size: int, seed: int) -> Iterator[list[Pair]]:
    """So many pairs each, in a new order every pass, without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(pairs))
        for start in range(0, len(order) - size + 1, size):
            yield [pairs[i] for i in order[start : start + size]]


def train(
    model: Path,
    train_pairs: Sequence[Pair],
    held_out: Sequence[Pair],
    directory: Path,
    *,
    steps: int,
    batch_pairs: int = 64,
    lr: float = 1e-3,
    seed: int = 1,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """Train the model in `model`, and write it to `directory`.

    Returns what `accuracy` gives for the held-out pairs, `before` and `after`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    context = PluginContext(
        seed=seed,
        role="reward_model",
        head="value",
        model=ModelSection(path=str(model), dtype=dtype),
        training=TrainingSection(
            optim=OptimSection(
                name="adamw",
                lr=lr,
                schedule=PluginSection(name="cosine"),
                warmup_steps=max(1, steps // 20),
                weight_decay=0.0,
            )
        ),
        total_steps=steps,
        tokenizer=tokenizer,
    )
    engine: Any = make_plugin(PluginRef(kind="engine", name="fsdp2"), context)
    engine.start()
    try:
        before = accuracy(engine, held_out, tokenizer)
        batches = mini_batches(train_pairs, min(batch_pairs, len(train_pairs)), seed)
        for step in range(1, steps + 1):
            metrics = values(engine.update(to_batch(next(batches), tokenizer), OBJECTIVE))
            if progress is not None:
                progress(step, metrics)
        after = accuracy(engine, held_out, tokenizer)
        engine.export(directory)
    finally:
        engine.close()
    return {"before": before, "after": after}


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = Path("demo/reward_model")
    parser.add_argument("--model", type=Path, default=where / "base", help="where it starts")
    parser.add_argument("--train", type=Path, default=where / "train.jsonl", help="pairs")
    parser.add_argument("--held-out", type=Path, default=where / "held_out.jsonl", help="pairs")
    parser.add_argument("--out", type=Path, default=where / "model", help="directory")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-pairs", type=int, default=64, help="pairs a step")
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="near 1e-5 for billions of parameters"
    )
    parser.add_argument("--dtype", default="float32", help="of the passes, such as bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()

    def report(step: int, metrics: Mapping[str, float]) -> None:
        if step % 20 == 0:
            loss, right = metrics["reward_model/loss"], metrics["reward_model/accuracy"]
            print(f"step {step}/{given.steps}  loss {loss:.3f}  accuracy {100 * right:.1f}%")

    held_out = read_pairs(given.held_out)
    result = train(
        given.model,
        read_pairs(given.train),
        held_out,
        given.out,
        steps=given.steps,
        batch_pairs=given.batch_pairs,
        lr=given.lr,
        seed=given.seed,
        dtype=given.dtype,
        progress=report,
    )
    for when, figures in result.items():
        print(
            f"{when}: {100 * figures['accuracy']:.1f}% of {len(held_out)} held-out pairs, "
            f"margin {figures['margin']:.2f}, loss {figures['loss']:.3f}"
        )


if __name__ == "__main__":
    main()
