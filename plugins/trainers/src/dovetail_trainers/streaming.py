"""StreamingTrainer: learns while further samples are generated, on samples of bounded staleness."""

from __future__ import annotations

from typing import cast

from dovetail.interfaces import PluginConfig, Run, Trainer
from dovetail_trainers.config import StreamingConfig
from dovetail_trainers.on_policy import due


class StreamingTrainer(Trainer):
    """Trains on the samples that were admitted first, while those of later steps are generated.

    With B prompts a step, K = `sync_every` and S = `max_staleness`, prompts are admitted while fewer than (S + 1) · K · B are
    outstanding: admitted, or in a step that no publication of weights has followed. Steps take them in the order of admission.
    So the last prompt admitted under a version is trained on before S + 1 further versions are sent. With `over_sampling` fewer are
    outstanding, and steps take the prompts that are finished first, unless one that is left could not be trained on in time.
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
