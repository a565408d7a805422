"""SupervisedTrainer: steps over the examples of a dataset."""

from __future__ import annotations

from dovetail.interfaces import Examples, PluginConfig, Run, Trainer
from dovetail_trainers.config import SupervisedConfig
from dovetail_trainers.on_policy import due


class SupervisedTrainer(Trainer):
    """Trains on examples of a dataset: conversations, preference pairs, or rated responses."""

    name = "supervised"
    api = ">=2.1,<3"
    capabilities = frozenset({"deterministic"})
    Config = SupervisedConfig

    @classmethod
    def examples(cls, config: PluginConfig) -> Examples:
        return config.examples

    def run(self, run: Run) -> None:
        if self.config.validate_before and not run.position.validated:
            run.validate()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)
            if due(run, self.config.validate_every):
                run.validate()
            if due(run, self.config.save_every):
                run.save()
        if self.config.save_last:
            run.save()
        if self.config.validate_after:
            run.validate()
