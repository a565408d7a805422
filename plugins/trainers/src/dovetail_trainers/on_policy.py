"""OnPolicyTrainer: collect, learn, publish, one after another."""

from __future__ import annotations

from dovetail.interfaces import Run, Trainer


class OnPolicyTrainer(Trainer):
    """Trains every step on samples that the current weights generated."""

    name = "on_policy"
    api = ">=2.0,<3"
    capabilities = frozenset({"deterministic"})

    def run(self, run: Run) -> None:
        run.publish_weights()
        if self.config.validate_before and not run.position.validated:
            run.validate()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                run.learn(step)
                run.publish_weights()
            if due(run, self.config.validate_every):
                run.validate()
            if due(run, self.config.save_every):
                run.save()
        if self.config.save_last:
            run.save()
        if self.config.validate_after:
            run.validate()


def due(run: Run, every: int) -> bool:
    """Return whether to validate or save after the step that has just ended: its number is a multiple of `every`. False if `every` is 0.

    Also False after the run's last step, which `validate_after` and `save_last` govern.
    """
    return bool(every) and run.position.step % every == 0 and not run.position.finished
