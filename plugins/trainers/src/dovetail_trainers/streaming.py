"""StreamingTrainer: learns while further samples are generated, on samples of bounded staleness."""

from __future__ import annotations

from typing import cast

from dovetail.interfaces import PluginConfig, Run, Trainer
from dovetail_trainers.config import StreamingConfig
from dovetail_trainers.on_policy import due


class StreamingTrainer(Trainer):
    """Trains on the samples of one step while samples of later steps are generated.

    With B prompts per step, K = `sync_every` and S = `max_staleness`, new prompts start while fewer than (S + 1) · K · B are
    outstanding. A prompt is outstanding from its start until weights are sent after its step. Steps take prompts in the order in which
    they started. So every prompt is trained on before S + 1 weight updates have followed its start. With `over_sampling`,
    fewer prompts are outstanding, and steps take the prompts that finish first unless another prompt would become too stale.
    """

    name = "streaming"
    api = ">=2.4,<3"
    capabilities = frozenset({"deterministic"})
    Config = StreamingConfig

    @classmethod
    def max_staleness(cls, config: PluginConfig) -> int:
        return cast("StreamingConfig", config).steps_behind

    @classmethod
    def over_sampling(cls, config: PluginConfig) -> float | None:
        return cast("StreamingConfig", config).over_sampling

    @classmethod
    def sync_every(cls, config: PluginConfig) -> int:
        return cast("StreamingConfig", config).sync_every

    def run(self, run: Run) -> None:
        config: StreamingConfig = self.config
        run.publish_weights()
        if config.validate_before and not run.position.validated:
            run.validate()
        while not run.position.finished:
            with run.step() as step:
                run.admit(run.position.admissible)
                run.collect(step)
                run.learn(step)
                if step.number % config.sync_every == 0:
                    run.publish_weights()
            if due(run, config.validate_every):
                run.validate()
            if due(run, config.save_every):
                run.save()
        if run.position.step % config.sync_every:
            run.publish_weights()
        if config.save_last:
            run.save()
        if config.validate_after:
            run.validate()
