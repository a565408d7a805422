"""A whole run with a faulty plugin of each kind: the first step names it with its version, and no weight changes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import yaml

from dovetail.batch import Batch
from dovetail.errors import DovetailError
from dovetail.interfaces import (
    AdvantageEstimator,
    Advantages,
    DatasetSource,
    PolicyLoss,
    RewardManager,
    RolloutCorrection,
    SampleFilter,
    Sampler,
    Score,
)
from dovetail.metrics import Last
from dovetail.run.run import train
from dovetail_sdk.testing import temporary_plugins, tiny_model_and_tokenizer
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout
from dovetail_sdk.testing.table_engine import TableEngine

FAULTY = {"name": "faulty", "api": ">=1.0,<2"}


def faulty(base: type, **members: Any) -> type:
    """A plugin `faulty` with these members."""
    return type(f"Faulty{base.__name__}", (base,), {**FAULTY, **members})


class Table(TableEngine):
    """The engine of every run; notes its updates."""

    trained: ClassVar[list[int]] = []

    def update(self, mini_batch, objective):
        self.trained.append(len(mini_batch))
        return super().update(mini_batch, objective)


class Scripted(ScriptedRollout):
    capabilities = frozenset({"logprobs"})


async def _int32(self, request):
    async for completion in ScriptedRollout.submit(self, request):
        yield attrs.evolve(completion, response_ids=completion.response_ids.astype(np.int32))


def _float64(self, batch, outputs):
    mask = batch["response_mask"]
    return Batch({name: mask.with_values(np.zeros(len(mask.values))) for name in outputs})


async def _twice(self, samples, time):
    return [Score(value=1.0)] * 2 * len(samples)


async def _a_number(self, samples, time):
    return [1.0 for _ in samples]


_ORDERS = itertools.count()
CASES: dict[str, tuple[type, list[str], str]] = {
    "dataset": (
        faulty(DatasetSource, read=lambda self, paths: [("1 + 1 =", "2")]),
        ["data.source=faulty"],
        "dataset/faulty (temporary-plugins 0): row 0 of group 0 is of type tuple",
    ),
    "dataset that raises": (
        faulty(DatasetSource, read=lambda self, paths: {}["rows"]),
        ["data.source=faulty"],
        "dataset/faulty (temporary-plugins 0) raised KeyError: 'rows'",
    ),
    "sampler": (
        faulty(Sampler, order=lambda self, size, epoch: np.zeros(size, np.int64)),
        ["data.sampler=faulty"],
        "sampler/faulty (temporary-plugins 0) returned int64 [4], which is not a permutation of 4 rows",
    ),
    "sampler with a state": (
        faulty(Sampler, order=lambda self, size, epoch: np.roll(np.arange(size), next(_ORDERS))),
        ["data.sampler=faulty"],
        "sampler/faulty (temporary-plugins 0) returned two different orders",
    ),
    "rollout": (
        faulty(ScriptedRollout, submit=_int32),
        ["rollout.name=faulty"],
        "rollout/faulty (temporary-plugins 0): sample 'train.e0.p0.a0.s0': response_ids is int32",
    ),
    "reward manager": (
        faulty(RewardManager, score=_twice),
        ["reward.manager=faulty"],
        "reward_manager/faulty (temporary-plugins 0): reward manager 'faulty' returned 2 outcomes for 1 samples",
    ),
    "reward manager of numbers": (
        faulty(RewardManager, score=_a_number),
        ["reward.manager=faulty"],
        "reward_manager/faulty (temporary-plugins 0): reward manager 'faulty' gave 1.0 (float)",
    ),
    "sample filter": (
        faulty(SampleFilter, action="drop", keep=lambda self, columns, groups: [True]),
        ["algorithm.sample_filters=[faulty]"],
        "sample_filter/faulty (temporary-plugins 0) returned list",
    ),
    "engine": (
        faulty(Table, forward=_float64),
        ["actor.engine=faulty", "actor.epochs=2"],
        "engine/faulty (temporary-plugins 0): forward returned 'log_probs' as float64",
    ),
    "rollout correction": (
        faulty(
            RolloutCorrection,
            requires=classmethod(lambda cls, config: frozenset({"rollout_log_probs"})),
            correct=lambda self, *args, **named: None,
        ),
        ["algorithm.rollout_correction=faulty", "actor.epochs=2"],
        "rollout_correction/faulty (temporary-plugins 0)",
    ),
    "advantage": (
        faulty(
            AdvantageEstimator,
            scope="group",
            level="sample",
            estimate=lambda self, columns, groups: Advantages(advantages=columns["scores"] * 1j),
        ),
        ["algorithm.advantage=faulty"],
        "advantage/faulty (temporary-plugins 0) returned advantages that are complex64",
    ),
    "policy loss": (
        faulty(PolicyLoss, token_losses=lambda self, *args, **named: None),
        ["algorithm.policy_loss=faulty"],
        "policy_loss/faulty (temporary-plugins 0)",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    rows = [{"prompt": f"{n} + 1 =", "reward_model": {"ground_truth": str(n)}} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) % 3\n"
    )
    document = {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "rows.jsonl")],
            "train_batch_size": 2,
            "max_response_length": 8,
            "max_prompt_length": 32,
            "sampler": "sequential",
        },
        "rollout": {"name": "scripted", "n": 2, "weight_check": {"every": 0}},
        "actor": {"engine": "table"},
        "algorithm": {"advantage": "grpo", "logprob_check": {"every": 0}},
        "reward": {"function": {"path": str(tmp_path / "reward.py")}},
        "trainer": {"total_steps": 1},
        "tracking": [],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_run_with_sound_ones_trains(config):
    Table.trained.clear()
    with temporary_plugins(Table, Scripted):
        assert train(config)["steps"] == 1
    assert Table.trained == [4]


@pytest.mark.parametrize(("plugin", "overrides", "words"), CASES.values(), ids=CASES)
def test_a_faulty_plugin_stops_the_first_step_by_name_and_version(config, plugin, overrides, words):
    Table.trained.clear()
    with temporary_plugins(Table, Scripted, plugin), pytest.raises(DovetailError) as caught:
        train(config, overrides)
    assert words in str(caught.value)
    if plugin.__base__ is not PolicyLoss:  # which is asked within the update
        assert Table.trained == []


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {"actor/grad_norm": Last(np.inf)},
            "update returned the metric 'actor/grad_norm' with the value inf",
        ),
        (
            {"actor/lr": 0.1},
            "update returned the metric 'actor/lr' as float, which can't be merged",
        ),
        (
            {"lr": Last(0.1)},
            "update returned the metric 'lr' of the actor; expected a name with a prefix and a slash, such as actor/",
        ),
        ([0.1], "update returned list, not metrics by name"),
    ],
)
def test_metrics_of_an_update_that_are_none_end_the_run_unsaved(config, tmp_path, metrics, words):
    engine = faulty(Table, update=lambda self, mini_batch, objective: metrics)
    with temporary_plugins(Table, Scripted, engine), pytest.raises(DovetailError) as caught:
        train(config, ["actor.engine=faulty"])
    assert "engine/faulty (temporary-plugins 0): " + words in str(caught.value)
    assert not list(tmp_path.glob("runs/**/checkpoints/step_1"))
