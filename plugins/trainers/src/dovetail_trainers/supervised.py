"""SupervisedTrainer: steps over the examples of a dataset."""

from __future__ import annotations

from dovetail.interfaces import Examples, PluginConfig, Run, Trainer
from dovetail_trainers.config import SupervisedConfig


class SupervisedTrainer(Trainer):
    """Trains on examples of a dataset: conversations, or preference pairs."""

    name = "supervised"
    api = ">=2.1,<3"
    capabilities = frozenset({"deterministic"})
    Config = SupervisedConfig

    @classmethod
    def examples(cls, config: PluginConfig) -> Examples:
        kind: Examples = config.examples
        return kind

    def run(self, run: Run) -> None:
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)
            every = self.config.save_every
            if every and run.position.step % every == 0 and not run.position.finished:
                run.save()
        if self.config.save_last:
            run.save()
