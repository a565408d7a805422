"""The counts of a run, in prompts and in samples, each with its unit."""

from __future__ import annotations

import attrs

from dovetail.errors import PlanError
from dovetail.interfaces.source import StepRows
from dovetail.sections import RunConfig


@attrs.frozen(kw_only=True)
class RunCounts:
    """Counts of a run. Its fields call every row of the data a prompt, even if the rows are examples; a sample is one response."""

    of: StepRows
    """What a row of the data is called in this run, and how many samples a row gives in a step."""
    prompts_per_step: int
    prompts_per_mini_batch: int
    epochs_per_step: int
    """Passes of the actor over each rollout batch."""
    critic_prompts_per_mini_batch: int
    critic_epochs_per_step: int
    """Passes of the critic over each rollout batch."""
    critic_warmup_steps: int = 0
    """Number of steps at the start of the run in which only the critic is trained."""
    train_prompts: int | None
    """Training prompts after filtering; None if the data has not been read."""
    steps: int | None
    """Steps of the run; None if the data has not been read."""

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.of.samples

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the actor after each rollout."""
        return self.epochs_per_step * -(-self.prompts_per_step // self.prompts_per_mini_batch)

    @property
    def critic_updates_per_step(self) -> int:
        """Optimizer steps of the critic after each rollout."""
        cuts = -(-self.prompts_per_step // self.critic_prompts_per_mini_batch)
        return self.critic_epochs_per_step * cuts

    @property
    def total_updates(self) -> int | None:
        """Optimizer steps of the actor in the run; None if the data has not been read."""
        if self.steps is None:
            return None
        return max(self.steps - self.critic_warmup_steps, 0) * self.updates_per_step

    @property
    def total_critic_updates(self) -> int | None:
        """Optimizer steps of the critic in the run; None if the data has not been read."""
        return None if self.steps is None else self.steps * self.critic_updates_per_step

    def rows(self) -> list[tuple[str, str]]:
        """Return the counts as pairs of a label and a text, for printing."""
        rows = [
            ("a step", self._samples(self.prompts_per_step)),
            ("a mini-batch", self._samples(self.prompts_per_mini_batch)),
            ("optimizer steps a step", f"{self.updates_per_step:,}"),
        ]
        if self.train_prompts is not None:
            rows.append((f"training {self.of.name}", f"{self.train_prompts:,}"))
        if self.steps is not None:
            plural = "" if self.total_updates == 1 else "s"
            rows.append(
                ("steps", f"{self.steps:,} ({self.total_updates:,} optimizer step{plural})")
            )
        return rows

    def _samples(self, prompts: int) -> str:
        rows, n = self.of, self.of.samples
        return f"{prompts:,} {rows.name}" + (
            f" × {n} = {prompts * n:,} {rows.samples_are}" if n > 1 else ""
        )


PROMPTS = StepRows(name="prompts")


def count(config: RunConfig, prompts: int | None, rows: StepRows = PROMPTS) -> RunCounts:
    """Return the counts of a run, computed from its config and the number of its training prompts.

    Args:
        config: the whole config.
        prompts: the number of training prompts, after filtering; None if the data has not been read.
        rows: what a row of the data is called, and how many samples a row gives in a step.

    Raises:
        PlanError: there are fewer training prompts than one step takes.
    """
    batch = config.data.train_batch_size
    if prompts is not None and prompts < batch:
        samples = f" ({batch * rows.samples} {rows.samples_are})" if rows.samples > 1 else ""
        raise PlanError(
            f"data.train_batch_size is {batch} {rows.name}{samples}, but there are only "
            f"{prompts} training {rows.name} after filtering",
            hint=f"set data.train_batch_size={max(prompts, 1)} or less, or add training files",
        )
    steps = None if prompts is None else prompts * config.trainer.total_epochs // batch
    if config.trainer.total_steps is not None:
        steps = config.trainer.total_steps
    return RunCounts(
        of=rows,
        prompts_per_step=batch,
        prompts_per_mini_batch=config.actor.mini_batch_size or batch,
        epochs_per_step=config.actor.epochs,
        critic_prompts_per_mini_batch=config.critic.mini_batch_size
        or config.actor.mini_batch_size
        or batch,
        critic_epochs_per_step=config.critic.epochs or config.actor.epochs,
        train_prompts=prompts,
        steps=steps,
    )
