"""Cases of low-rank adapters: an adapter acts like merged weights, can be replaced, applies to new base weights, and stays in use if the
next adapter is refused.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import attrs
import numpy as np
import pytest

from dovetail.errors import DovetailError
from dovetail.interfaces import BaseRollout
from dovetail.sections import PlannedAdapter
from dovetail_sdk.testing.conformance.rollout.low_rank import PlainAdapter
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.conformance.rollout.suite import (
    LONG,
    RolloutSuite,
    next_version,
)

SCORED = np.arange(5, 69)
"""Token ids whose log-probabilities tell models apart."""
EVERY_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class AdapterCases(RolloutSuite):
    """Tests of the capability `lora`. If the engine allocates adapters when it starts, the config must reserve room for them."""

    adapter_rank: ClassVar[int] = 4
    """Rank of the adapters that are sent."""

    @pytest.mark.parametrize(
        ("modules", "rank_stabilised"),
        [
            (EVERY_LAYER, False),
            # Engines fuse layers. In these cases only one part of each fused layer has an adapter.
            (("q_proj", "up_proj"), False),
            (("k_proj", "gate_proj", "o_proj"), True),
            (("v_proj", "down_proj"), False),
        ],
        ids=["every_layer", "q_up", "k_gate_o_rank_stabilised", "v_down"],
    )
    def test_an_adapter_is_used_as_if_it_were_merged(
        self, fresh: BaseRollout, plain: PlainModel, modules: tuple[str, ...], rank_stabilised: bool
    ) -> None:
        self.needs_room(modules)
        adapter = self.adapter(plain, modules, rank_stabilised=rank_stabilised)
        merged = self.merged(adapter, plain)
        version = self.adapt(fresh, adapter)
        self.assert_serves(fresh, merged, version)

    def test_another_adapter_takes_its_place_and_nothing_of_it_is_left_in_caches(
        self, fresh: BaseRollout, plain: PlainModel
    ) -> None:
        self.needs_room(EVERY_LAYER)
        for seed, modules in enumerate((EVERY_LAYER, ("v_proj", "down_proj"))):
            self.generate(fresh, self.request(LONG, n=2))
            adapter = self.adapter(plain, modules, seed=seed)
            merged = self.merged(adapter, plain)
            version = self.adapt(fresh, adapter)
            self.assert_serves(fresh, merged, version)

    def test_whole_weights_take_an_adapters_place_and_another_adapter_lies_upon_them(
        self, fresh: BaseRollout, plain: PlainModel, changed: PlainModel
    ) -> None:
        self.needs_room(EVERY_LAYER)
        self.adapt(fresh, self.adapter(plain, EVERY_LAYER))
        version = self.update(fresh, changed)
        self.assert_serves(fresh, changed, version)
        adapter = self.adapter(plain, EVERY_LAYER)
        merged = self.merged(adapter, changed)
        version = self.adapt(fresh, adapter)
        self.assert_serves(fresh, merged, version)

    @pytest.mark.parametrize("fault", ["breaks off", "names another layer"])
    def test_an_adapter_that_is_not_taken_leaves_the_one_before_in_force(
        self, fresh: BaseRollout, plain: PlainModel, fault: str
    ) -> None:
        self.needs_room(EVERY_LAYER)
        before = self.adapter(plain, EVERY_LAYER)
        merged = self.merged(before, plain)
        version = self.adapt(fresh, before)
        torn = self.adapter(plain, EVERY_LAYER, seed=1)
        if fault == "names another layer":
            torn = torn.renamed("down_proj", "side_proj")
        sent = list(torn.tensors.items())
        with pytest.raises(DovetailError):
            self.send(
                fresh, torn.manifest, sent[: len(sent) // 2] if fault == "breaks off" else sent
            )
        self.assert_serves(fresh, merged, version)
        version = self.adapt(fresh, self.adapter(plain, EVERY_LAYER))
        self.assert_serves(fresh, merged, version)

    def test_an_adapter_beyond_its_room_is_refused_before_anything_is_sent(
        self, fresh: BaseRollout, plain: PlainModel
    ) -> None:
        self.needs_room(EVERY_LAYER)
        problem = self.make_config().adapter_problem(1 << 20)
        if problem is None:
            pytest.skip("the config sets no maximum rank")
        adapter = self.adapter(plain, EVERY_LAYER)
        merged = self.merged(adapter, plain)
        version = self.adapt(fresh, adapter)
        spec = adapter.manifest.adapter
        assert spec is not None
        large = attrs.evolve(
            adapter.manifest, version=next_version(), adapter=attrs.evolve(spec, rank=1 << 20)
        )
        with pytest.raises(DovetailError, match=str(1 << 20)):
            fresh.check_manifest(large.version, large)
        self.assert_serves(fresh, merged, version)

    def test_an_adapter_and_what_it_lies_upon_outlast_sleep(
        self, fresh: BaseRollout, plain: PlainModel
    ) -> None:
        self.needs("sleep")
        self.needs_room(EVERY_LAYER)
        adapter = self.adapter(plain, EVERY_LAYER)
        merged = self.merged(adapter, plain)
        version = self.adapt(fresh, adapter)
        tags = frozenset({"weights", "kv_cache"})
        fresh.sleep(tags)
        fresh.wake(tags)
        asyncio.run(fresh.reset_cache())
        self.assert_serves(fresh, merged, version)

    # -- what the cases use --------------------------------------------------------------------

    def needs_room(self, modules: tuple[str, ...]) -> None:
        """Skip the test if the plugin does not claim `lora`, or if its config has no room for adapters on these modules."""
        self.needs("lora")
        planned = PlannedAdapter(rank=self.adapter_rank, target_modules=modules)
        why = self.make_config().unfit_adapter(planned)
        if why is not None:
            pytest.skip(f"an adapter of {', '.join(modules)}: with this config, the engine {why}")

    def adapter(
        self,
        plain: PlainModel,
        modules: tuple[str, ...],
        *,
        rank_stabilised: bool = False,
        seed: int = 0,
    ) -> PlainAdapter:
        """Return a random adapter, drawn from the seed, with a version higher than all earlier versions."""
        return PlainAdapter.random(
            plain,
            next_version(),
            modules,
            rank=self.adapter_rank,
            rank_stabilised=rank_stabilised,
            seed=seed,
        )

    def merged(self, adapter: PlainAdapter, base: PlainModel) -> PlainModel:
        """Return the reference model with the adapter merged, after asserting that its predictions differ from the base model's."""
        merged = adapter.merged(base)
        assert np.abs(merged.score(SCORED) - base.score(SCORED)).max() > 2 * self.tolerance
        return merged

    def adapt(self, engine: BaseRollout, adapter: PlainAdapter) -> int:
        """Send an adapter to the engine, empty the engine's caches, and return the adapter's version."""
        tensors = {name: of.to(self.weights_device) for name, of in adapter.tensors.items()}
        self.send(engine, adapter.manifest, tensors.items())
        asyncio.run(engine.reset_cache())
        return adapter.manifest.version

    def assert_serves(self, engine: BaseRollout, model: PlainModel, version: int) -> None:
        """Assert that the engine generates and scores with this model's weights and reports this version for every token."""
        completion = self.greedy(engine, LONG)
        self.assert_greedy(completion, LONG, model)
        assert set(completion.weight_versions.tolist()) == {version}
        if self.claims("logprobs"):
            for sample in self.generate(engine, self.request(1, log_probs=True))["prompt1"]:
                self.assert_likely(sample, 1, model)
                assert set(sample.weight_versions.tolist()) == {version}
        if self.claims("scores"):
            (scores,) = asyncio.run(engine.score([SCORED]))
            np.testing.assert_allclose(scores, model.score(SCORED), atol=self.tolerance, rtol=0)
