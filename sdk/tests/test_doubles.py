"""The test doubles that authors use: a temporary registry, and an engine whose policy is a table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.config import config_from_mapping
from dovetail.errors import PluginError, PluginNotFoundError
from dovetail.interfaces import PluginContext, PluginRef, Sampler
from dovetail.plugins import make_plugin, objective_spec
from dovetail.plugins.index import default_index
from dovetail.sections import PluginSection
from dovetail_sdk.testing import TableEngine, temporary_plugins


class Backwards(Sampler):
    """The last row first."""

    name = "backwards"
    aliases = ("reversed",)
    api = ">=1.0,<2"

    def order(self, size, epoch):
        return np.arange(size)[::-1].copy()


def test_a_temporary_plugin_is_selected_made_and_gone_afterwards():
    before = default_index()
    with temporary_plugins(Backwards, TableEngine):
        loaded = config_from_mapping({"model": {"path": "tiny"}, "data": {"sampler": "reversed"}, "actor": {"engine": "table"}})  # fmt: skip
        section = loaded.config.data.sampler
        made = make_plugin(PluginRef(kind="sampler", name="backwards", config=section), PluginContext())  # fmt: skip
        assert made.order(3, 0).tolist() == [2, 1, 0]
        with temporary_plugins(type("Other", (Backwards,), {"name": "other"})) as index:
            assert {e.name for e in index.entries("sampler")} >= {"backwards", "other", "shuffled"}
        assert "other" not in {e.name for e in default_index().entries("sampler")}
    assert default_index() is before
    with pytest.raises(PluginNotFoundError, match="backwards"):
        default_index().find("sampler", "backwards")


def test_it_takes_the_place_of_an_installed_one():
    with temporary_plugins(type("Mine", (Backwards,), {"name": "shuffled", "aliases": ()})):
        made = make_plugin(PluginRef(kind="sampler", name="shuffled"), PluginContext())
        assert made.order(3, 0).tolist() == [2, 1, 0]


def test_what_is_no_plugin_is_refused():
    with (
        pytest.raises(PluginError, match="does not extend a plugin interface"),
        temporary_plugins(dict),
    ):
        pass


def batch() -> Batch:
    responses = Ragged.from_list([[3, 4], [3]], dtype=np.int64)
    return Batch(
        {
            "response_ids": responses,
            "response_mask": responses.with_values(np.array([True, False, True])),
            "temperature": np.array([1.0, 0.5], np.float32),
            "advantages": np.array([1.0, 1.0], np.float32),
            "sample_id": ["a", "b"],
        }
    )


def test_the_table_scores_and_learns_as_worked_out_by_hand():
    engine = TableEngine()
    scored = engine.forward(batch(), frozenset({"log_probs"}))["log_probs"]
    np.testing.assert_allclose(scored.values, [-np.log(512), 0, -np.log(512)], rtol=1e-6)
    objective = objective_spec(
        "policy",
        policy_loss=PluginSection(name="reinforce"),
        loss_aggregation=PluginSection(name="token_sum"),
    )
    engine.update(batch(), objective)
    # d/dz of Σ log softmax(z / τ) is (1[w] − 1/V) / τ, summed over the tokens with mask 1.
    expected_V = torch.full((512,), -3 / 512)
    expected_V[3] += 3
    torch.testing.assert_close(engine.logits_V.detach(), expected_V)


def test_the_tables_weights_are_saved_and_loaded(tmp_path):
    first, second = TableEngine(), TableEngine()
    with torch.no_grad():
        first.logits_V[7] = 2.0
    first.save(tmp_path)
    second.load(tmp_path)
    torch.testing.assert_close(second.logits_V, first.logits_V)
