"""The on-policy loop: rollout and score, prepare, advantages, update, sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.builtin import OnPolicyConfig
from dovetail.interfaces.trainer import Trainer
from dovetail.run.flow import Flow


class OnPolicyTrainer(Trainer):
    """Every step trains on samples of the weights that it is about to change."""

    name = "on_policy"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = OnPolicyConfig

    def run(self, flow: Flow) -> Mapping[str, Any]:
        with flow.running():
            flow.sync_weights()
            if self.config.validate_before and not flow.validated:
                flow.validate()
            while flow.step < flow.total_steps:
                self._step(flow)
                if self._due(flow, self.config.validate_every):
                    flow.validate()
                if self._due(flow, self.config.save_every):
                    flow.save()
            if self.config.save_last:
                flow.save()
            if self.config.validate_after:
                flow.validate()
        return flow.summary()

    def _step(self, flow: Flow) -> None:
        with flow.begin_step():
            rollout = flow.rollout_and_score(flow.loader.next_batch())
            batch = flow.prepare(rollout)
            batch = flow.estimate_advantages(batch)
            flow.update(batch)
            flow.sync_weights()

    def _due(self, flow: Flow, every: int) -> bool:
        return bool(every) and flow.step % every == 0 and flow.step < flow.total_steps
