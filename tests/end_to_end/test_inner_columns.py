"""A column [T, 3] of a stage from a file, through another stage, to the loss of every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

HEADS = """
import numpy as np
from dovetail.batch import Column
from dovetail.interfaces import PolicyLoss, Stage, TokenLosses

COLUMN = Column("kit.heads", "float32", "ragged", "three numbers a token", "kit", "response_ids", (3,))


class Heads(Stage):
    name = "heads"
    api = ">=1.0,<2"
    phase = "score"
    columns = (COLUMN,)

    @classmethod
    def provides(cls, config, facts):
        return frozenset({"kit.heads"})

    def run(self, batch, step):
        ids = batch["response_ids"]
        heads_T3 = np.outer(ids.values, [1, 2, 3]).astype(np.float32)
        return batch.with_columns({"kit.heads": ids.with_values(heads_T3 + OFFSET)})


class Reader(Stage):
    name = "reader"
    api = ">=1.0,<2"
    phase = "transform"

    @classmethod
    def requires(cls, config, facts):
        return {"kit.heads": "its metric", "response_ids": "its metric"}

    def run(self, batch, step):
        heads, ids = batch["kit.heads"], batch["response_ids"]
        assert heads.values.shape == (ids.total, 3)
        step.metrics["reader/last_head"] = float(heads.values[:, 2].mean() / ids.values.mean())
        return batch


class Weighted(PolicyLoss):
    name = "weighted"
    api = ">=1.0,<2"

    @classmethod
    def requires(cls, config):
        return frozenset({"advantages", "response_ids", "kit.heads"})

    def token_losses(self, inputs):
        heads_T3, ids_T = inputs.columns["kit.heads"], inputs.columns["response_ids"]
        for head in (0, 1, 2):  # each token has its own numbers, on whichever rank it is
            assert (heads_T3[:, head] == (head + 1) * ids_T).all()
        weight_T = heads_T3[:, 2] / 300
        return TokenLosses(losses_T=-inputs.columns["advantages"] * weight_T * inputs.log_probs_T)
"""


@pytest.fixture
def overrides(tmp_path: Path) -> Callable[..., list[str]]:
    """Of a run whose stages and loss are in a file; `offset` is added to the column."""

    def written(experiment: str, offset: str = "0") -> list[str]:
        file = tmp_path / f"{experiment}.py"
        file.write_text(HEADS.replace("OFFSET", offset))
        stages = [f"{{path: {file}, attribute: {name}}}" for name in ("Heads", "Reader")]
        return [
            f"experiment={experiment}",
            f"algorithm.stages=[{', '.join(stages)}]",
            f"algorithm.policy_loss={{path: {file}, attribute: Weighted}}",
            "data.val_files=[]",
            "actor.optim.lr=0",
        ]

    return written


def losses(run: Path) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and the reader's metric of each step."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    names = ("actor/pg_loss", "actor/grad_norm", "reader/last_head")
    return [tuple(row[name] for name in names) for row in rows if names[0] in row]  # type: ignore[misc]


def test_a_stage_and_the_loss_read_what_a_stage_of_a_file_wrote(
    config: Path, overrides: Any, inside: Callable[..., Result], tmp_path: Path
) -> None:
    inside("train", str(config), *overrides("alone"))
    steps = losses(tmp_path / "runs" / "tests" / "alone")
    assert len(steps) == 3
    assert [last for *_, last in steps] == pytest.approx([3, 3, 3], rel=1e-5)
    assert all(norm > 0 for _, norm, _ in steps)


def test_a_fault_in_it_stops_the_step_and_all_numbers_of_the_token_are_in_the_file(
    config: Path, overrides: Any, inside: Callable[..., Result], tmp_path: Path
) -> None:
    second = "(np.arange(ids.total) == 5)[:, None] & (np.arange(3) == 1)"
    fault = f"np.where({second}, np.nan, 0).astype(np.float32)"
    done = inside("train", str(config), *overrides("faulty", fault), check=False)
    assert done.exit_code != 0
    (file,) = (tmp_path / "runs" / "tests" / "faulty" / "faults").glob("step_1.json")
    (sample,) = json.loads(file.read_text())["samples"]
    (found,) = sample["faults"]
    assert (found["column"], found["positions"]) == ("kit.heads", [5])
    first, wrong, last = found["values"][0]
    assert (wrong, float(last)) == ("nan", 3 * float(first))


@pytest.mark.nightly
@pytest.mark.ray
def test_two_ranks_get_their_tokens_numbers_and_compute_what_one_does(
    config: Path, overrides: Any, inside: Callable[..., Result], dovetail: Any, tmp_path: Path
) -> None:
    inside("train", str(config), *overrides("one"))
    two = ("runtime.name=ray", "runtime.workers_per_node=2")
    dovetail("train", str(config), *overrides("two"), *two)
    runs = tmp_path / "runs" / "tests"
    for got, want in zip(losses(runs / "two"), losses(runs / "one"), strict=True):
        assert got == pytest.approx(want, rel=1e-4)
