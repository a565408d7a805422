"""A source that does not do what it says: the step names it with its distribution, and no weight changes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.config import config_from_mapping
from dovetail.errors import DovetailError
from dovetail.planning.plan import make_plan
from dovetail.run.run import train
from dovetail_rollouts import SourceWrapper
from dovetail_sdk.testing import temporary_plugins, tiny_model_and_tokenizer
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout
from dovetail_sdk.testing.table_engine import TableEngine


class Table(TableEngine):
    """Notes its updates."""

    trained: ClassVar[list[int]] = []

    def update(self, mini_batch, objective):
        self.trained.append(len(mini_batch))
        return super().update(mini_batch, objective)


class Changed(SourceWrapper):
    """Gives what a function makes of what the source `rollouts` collects."""

    name, api = "changed", ">=2.0,<3"
    change: Any = None

    def collect(self, step, ask):
        experience = self.inner.collect(step, ask)
        batch = type(self).change(experience.batch())
        return SimpleNamespace(
            samples=experience.samples, reasons=experience.reasons, batch=lambda: batch
        )


class Returns(Changed):
    """Returns a value in place of an experience."""

    def collect(self, step, ask):
        super(Changed, self).collect(step, ask)
        return type(self).change


class Silent(SourceWrapper):
    """Sends no weights."""

    name, api = "changed", ">=2.0,<3"

    def publish(self):
        pass


class Twice(SourceWrapper):
    """Sends weights twice."""

    name, api = "changed", ">=2.0,<3"

    def publish(self):
        self.inner.publish()
        with self._weights.sending(lambda version: True):
            pass

    def open(self, site):
        self._weights = site.weights
        super().open(site)


class Larger(SourceWrapper):
    """Asks the source that it wraps for more groups than the step takes."""

    name, api = "changed", ">=2.0,<3"

    def collect(self, step, ask):
        return self.inner.collect(step, attrs.evolve(ask, groups=ask.groups + 1))


def first_group(batch):
    return batch.take(batch["group_id"] == batch["group_id"][0])


def changed(change, base=Changed):
    return type("ChangedSource", (base,), {"change": staticmethod(change) if callable(change) else change})  # fmt: skip


CASES = {
    "nothing": (changed(None, Returns), "returned NoneType from `collect`, not an experience"),
    "a batch": (changed(Batch({}), Returns), "returned Batch from `collect`, not an experience"),
    "columns": (changed(lambda b: dict(b.columns)), "whose `batch()` returned dict, not a Batch"),
    "no groups": (changed(lambda b: b.take(np.zeros(len(b), bool))), "collected 0 of the 2 groups"),
    "fewer groups": (changed(first_group), "collected 1 of the 2 groups that step 1 takes"),
    "more groups": (Larger, "collected 3 groups for step 1, which takes 2"),
    "a column that it does not declare": (
        changed(lambda b: b.with_columns({"values": b["token_rewards"]})),
        "returned the column 'values', which it does not declare",
    ),
    "no column that it promises": (
        changed(lambda b: b.drop(["reward_components"])),
        "returned no column 'reward_components', which its `gives` promises",
    ),
    "another dtype": (
        changed(lambda b: b.with_columns({"scores": b["scores"].astype(np.float64)})),
        "'scores' has dtype float64, not float32",
    ),
    "no weights": (Silent, "sent no weights in `publish`"),
    "raises": (changed(lambda b: {}["nowhere"]), "raised KeyError: 'nowhere'"),
}


class Reads(SourceWrapper):
    """Reads a column that there is none of."""

    name, api = "changed", ">=2.0,<3"

    def collect(self, step, ask):
        return self.inner.collect(step, ask).batch()["nowhere"]


CASES["reads a column that is not there"] = (Reads, "has no column 'nowhere'")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path, model):
    rows = [{"prompt": f"{n} + 1 =", "reward_model": {"ground_truth": str(n)}} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, **more):\n    return len(solution_str) % 3\n")  # fmt: skip
    return {
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "rows.jsonl")], "train_batch_size": 2, "max_response_length": 8, "max_prompt_length": 32},
        "rollout": {"name": "scripted", "n": 2, "weight_check": {"every": 0}},
        "actor": {"engine": "table"},
        "algorithm": {"policy_loss": "reinforce", "logprob_check": {"every": 0}},
        "reward": {"function": {"path": str(tmp_path / "reward.py")}},
        "source": "changed",
        "trainer": {"total_steps": 2},
        "tracking": [],
    }  # fmt: skip


@pytest.mark.parametrize(("source", "words"), CASES.values(), ids=CASES)
def test_a_faulty_source_stops_the_first_step_by_name_and_distribution(config, source, words):
    Table.trained.clear()
    with (
        temporary_plugins(Table, ScriptedRollout, source),
        pytest.raises(DovetailError) as caught,
    ):
        train(config_from_mapping(config))
    assert "source/changed (temporary-plugins 0)" in str(caught.value)
    assert words in str(caught.value)
    assert Table.trained == []


@pytest.mark.parametrize("base", [changed(lambda b: b), Twice])
def test_a_sound_source_trains_and_one_that_sends_twice_is_warned_about(config, base, capfd):
    with temporary_plugins(Table, ScriptedRollout, base):
        assert train(config_from_mapping(config))["steps"] == 2
    assert Table.trained
    assert ("sent weights 2 times" in capfd.readouterr().err) == (base is Twice)


@pytest.mark.parametrize(
    ("trainer", "source", "words"),
    [
        ("supervised", "rollouts", "but source 'rollouts' generates samples"),
        ("on_policy", "examples", "the source 'examples' provides only examples"),
    ],
)  # fmt: skip
def test_a_trainer_and_a_source_that_do_not_fit_are_refused(config, trainer, source, words):
    given = {**config, "source": source, "trainer": {"name": trainer}}
    with temporary_plugins(Table, ScriptedRollout), pytest.raises(DovetailError, match=words):
        make_plan(config_from_mapping(given).config)
