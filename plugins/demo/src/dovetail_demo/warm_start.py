"""The warm start: supervised fine-tuning on worked answers, as `dovetail sft` does it.

An answer adds digit by digit, as `7+8=15 3+4+1=8 #### 85`. Two of three answers never carry: `7+8=15 3+4+0=7 #### 75`. The
model learns the format, the sums of digits, and both rules; its most likely answer follows the more frequent rule. Only the reward shows
which rule is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dovetail
from dovetail_demo import SFT_CONFIG

STEPS = 200
BATCH_SIZE = 64
FORGETS_CARRY = 2 / 3
"""Share of the answers that never carry."""


def worked_answer(a: int, b: int, *, carries: bool) -> str:
    """Return the addition digit by digit: the ones, then the tens with the carry, then the answer after `####`.

    Args:
        a: the first number.
        b: the second number.
        carries: whether the carry is added; if not, the answer is wrong for an addition with a carry.
    """
    ones = a % 10 + b % 10
    carry = int(carries and ones >= 10)
    tens = a // 10 + b // 10 + carry
    return (
        f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}+{carry}={tens} #### {10 * tens + ones % 10}"
    )


def demonstrations(train_file: Path, seed: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """Return rows of training problems with worked answers, `prompt` and `response`, in training order.

    Args:
        train_file: problems, as `make_data` writes them.
        seed: the seed of the rows' order, and of the choice of the answers that leave out the carry.
        steps: the number of steps of `BATCH_SIZE` rows. Each pass over the problems has a new order; a last, incomplete batch of a pass is
            left out.
    """
    rng = np.random.default_rng(seed)
    prompts = pq.read_table(train_file, columns=["prompt"])["prompt"].to_pylist()
    operands = [
        [int(number) for number in turns[0]["content"].removesuffix("=?").split("+")]
        for turns in prompts
    ]
    rows: list[dict[str, Any]] = []
    while len(rows) < steps * BATCH_SIZE:
        order = rng.permutation(len(prompts))
        for i in order[: len(order) // BATCH_SIZE * BATCH_SIZE]:
            answer = worked_answer(*operands[i], carries=rng.random() >= FORGETS_CARRY)
            rows.append({"prompt": prompts[i], "response": answer})
    return rows[: steps * BATCH_SIZE]


def write_demonstrations(train_file: Path, seed: int) -> Path:
    """Write `sft.parquet` beside the training problems, and return its path."""
    path = train_file.with_name("sft.parquet")
    pq.write_table(pa.Table.from_pylist(demonstrations(train_file, seed)), path)
    return path


def warm_start(
    base: Path, train_file: Path, directory: Path, seed: int, device: str = "auto"
) -> Path:
    """Fine-tune the model in `base` on a torch device, and return the result's directory, in Hugging Face format.

    The model sees only training problems. `directory` is the run directory; its last two parts are project and experiment.
    """
    summary = dovetail.train(
        SFT_CONFIG,
        [
            f"seed={seed}",
            f"output_dir={directory.parent.parent}",
            f"project={directory.parent.name}",
            f"experiment={directory.name}",
            f"model.path={base}",
            f"data.train_files={write_demonstrations(train_file, seed)}",
            f"runtime.device={device}",
            "tracking=[jsonl]",
        ],
    )
    return Path(summary["model"])
