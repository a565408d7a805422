"""The warm start: supervised steps on worked answers, through the engine that RL uses later.

An answer adds digit by digit, as `7+8=15 3+4+1=8 #### 85`. Two of three answers never carry: `7+8=15 3+4+0=7 #### 75`. The
model learns the format, the sums of digits, and both rules; its most likely answer follows the common one. Which of the
two is right it can't know: the reward says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import ObjectiveSpec, PluginContext, PluginRef, Tokenizer
from dovetail.metrics import values
from dovetail.plugins import make_plugin, objective_spec
from dovetail.sections import ModelSection, OptimSection, PluginSection, TrainingSection

STEPS = 200
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
FORGETS_CARRY = 2 / 3
"""Share of the answers that never carry."""

Progress = Callable[[int, float], None]
"""Called after every step with its number, from 1, and its loss."""


def objective() -> ObjectiveSpec:
    """The negative log-likelihood: REINFORCE's −log π · A with A = 1, so that no second loss is needed for it."""
    return objective_spec("policy", policy_loss=PluginSection(name="reinforce"))


def worked_answer(a: int, b: int, *, carries: bool) -> str:
    """Digit by digit: the ones, then the tens with the carry, then the answer after `####`."""
    ones = a % 10 + b % 10
    carry = int(carries and ones >= 10)
    tens = a // 10 + b // 10 + carry
    return (
        f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}+{carry}={tens} #### {10 * tens + ones % 10}"
    )


def demonstrations(train_file: Path, tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Mini-batches of training problems with worked answers, without end.

    Each holds the columns that an engine's update reads: `prompt_ids`, `response_ids` (the end token
    included), `response_mask`, `temperature`, and `advantages`, which are 1.
    """
    rng = np.random.default_rng(seed)
    messages = pq.read_table(train_file, columns=["prompt"])["prompt"].to_pylist()
    # The chat template makes the prompts, here as in RL.
    texts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    operands = [
        [int(number) for number in turns[0]["content"].removesuffix("=?").split("+")]
        for turns in messages
    ]
    while True:
        order = rng.permutation(len(prompts))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            picked = order[start : start + BATCH_SIZE]
            answers = [
                worked_answer(*operands[i], carries=rng.random() >= FORGETS_CARRY) for i in picked
            ]
            responses = tokenizer(
                [answer + tokenizer.eos_token for answer in answers], add_special_tokens=False
            )["input_ids"]
            response_ids = Ragged.from_list(responses, np.int64)
            yield Batch(
                {
                    "prompt_ids": Ragged.from_list([prompts[i] for i in picked], np.int64),
                    "response_ids": response_ids,
                    "response_mask": response_ids.with_values(
                        np.ones(len(response_ids.values), np.bool_)
                    ),
                    "temperature": np.ones(BATCH_SIZE, np.float32),
                    "advantages": np.ones(BATCH_SIZE, np.float32),
                }
            )


def warm_start(
    base: Path,
    train_file: Path,
    directory: Path,
    seed: int,
    progress: Progress | None = None,
    device: str = "cpu",
) -> float:
    """Teach the model in `base` on a torch device, and write it to `directory` in Hugging Face format.

    Only training problems are seen. Returns the seconds that it took.
    """
    from transformers import AutoTokenizer

    began = perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(str(base))
    context = PluginContext(
        seed=seed,
        role="actor",
        model=ModelSection(path=str(base), dtype="float32"),
        training=TrainingSection(
            optim=OptimSection(
                lr=LEARNING_RATE, betas=(0.9, 0.95), schedule="linear", warmup_steps=10
            )
        ),
        total_steps=STEPS,
        tokenizer=tokenizer,
        device=device,
    )
    engine: Any = make_plugin(PluginRef(kind="engine", name="fsdp2"), context)
    engine.start()
    try:
        batches, goal = demonstrations(train_file, tokenizer, seed), objective()
        for step in range(1, STEPS + 1):
            metrics = values(engine.update(next(batches), goal))
            if progress is not None:
                progress(step, metrics["actor/pg_loss"])
        engine.export(directory)
    finally:
        engine.close()
    return perf_counter() - began
