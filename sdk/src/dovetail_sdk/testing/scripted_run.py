"""ScriptedRun: a run that trains nothing and records what its trainer calls, for tests of trainers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import attrs
import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import PluginBrokenError, StopRequested
from dovetail.interfaces import (
    Completion,
    Examples,
    FinishReason,
    PlanFacts,
    Prompt,
    Run,
    RunPosition,
    Sample,
    Score,
    StepContext,
)
from dovetail.sections import ModelSection, RunConfig

PROMPTS = 2
"""Number of prompts in a step, with one sample each."""


@attrs.frozen(kw_only=True)
class ScriptedExperience:
    """The experience of a step of `ScriptedRun`: the samples that the step trains on."""

    samples: Sequence[Sample]
    columns: Batch
    """The batch of the samples, which the method `batch` returns."""
    reasons: Mapping[tuple[int, int, int], str] = attrs.field(factory=dict)
    """(epoch, prompt, attempt) of each prompt that is not trained on → the reason."""

    @classmethod
    def of(cls, batch: Batch) -> ScriptedExperience:
        """Build the experience of a step from a batch of its N samples.

        Args:
            batch: a batch with `sample_id`, `response_ids`, `token_weight_versions` and `scores`.
        """
        rows = zip(
            batch["sample_id"],
            batch["response_ids"],
            batch["token_weight_versions"],
            batch["scores"].tolist(),
            strict=True,
        )
        samples = [
            Sample(
                sample_id=name,
                prompt=Prompt(index=0, raw=name),
                text=" ".join(map(str, tokens)),
                completion=Completion(
                    request_id=name,
                    sample=0,
                    response_ids=tokens,
                    finish_reason=FinishReason.STOP,
                    weight_versions=versions,
                ),
                outcome=Score(value=score),
            )
            for name, tokens, versions, score in rows
        ]
        return cls(samples=samples, columns=batch)

    def batch(self) -> Batch:
        """Return the columns of the samples that are trained on."""
        return self.columns


class ScriptedRun(Run):
    """A run without a model that keeps the contract of `Run`, fails or stops on demand, and records the trainer's calls.

    Step k has the prompts 2k − 2 and 2k − 1, whose samples are `step-k/0` and `step-k/1`.

    Attributes:
        calls: names of the methods that the trainer called, in order; `step` stands for the start of a step.
        learned: numbers of the steps that were learned from, in order.
        saved: the number of finished steps of each checkpoint, in order.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        step: int = 0,
        max_staleness: int = 0,
        examples: Examples = "prompts",
        stop_at: int | None = None,
        learn_error: Exception | None = None,
        fails_in: int = 1,
        validation: Mapping[str, float] | None = None,
    ) -> None:
        """Set the run's position and its faults.

        Args:
            total_steps: number of steps of the whole run.
            step: number of finished steps; above 0 the run is resumed from a checkpoint.
            max_staleness: the trainer's `max_staleness`: the maximum age of the rollout's weights, in steps.
            examples: the kind of the trainer's examples. Unless it is `prompts`, no responses are generated, the rollout's weight
                version does not change, and `validate` returns no metrics.
            stop_at: the number, from 1, of the call that raises StopRequested before it does anything; None for no stop.
            learn_error: the error that `learn` raises once, in step `fails_in`; None for none.
            fails_in: the number of the step in which `learn` fails.
            validation: the metrics of `validate`; by default `val/mean@1`.
        """
        self.calls: list[str] = []
        self.learned: list[int] = []
        self.saved: list[int] = [step] if step else []
        self._step, self._total_steps = step, total_steps
        self._max_staleness, self._stop_at = max_staleness, stop_at
        self._generates = examples == "prompts"
        self._learn_error, self._fails_in = learn_error, fails_in
        self._validation = {"val/mean@1": 0.5} if validation is None else dict(validation)
        self._validated = step > 0
        self._version = step
        self._published, self._unpublished = False, 0
        self._admitted: deque[int] = deque()
        self._current: StepContext | None = None

    @property
    def position(self) -> RunPosition:
        return RunPosition(
            step=self._step,
            total_steps=self._total_steps,
            epoch=0,
            weight_version=self._version,
            validated=self._validated,
            admissible=self._admissible,
        )

    @property
    def _admissible(self) -> int:
        if not self._generates or not self._published:
            return 0
        limit = (self._max_staleness + 1) * PROMPTS
        return max(0, min(self._left, limit - self._outstanding))

    @property
    def _collected(self) -> bool:
        return self._current is not None and self._current.collected is not None

    @property
    def _left(self) -> int:
        """The number of prompts that the remaining steps need, besides the queued prompts."""
        return (self._total_steps - self._step - self._collected) * PROMPTS - len(self._admitted)

    @property
    def _outstanding(self) -> int:
        """The number of prompts that are queued, or in a step that no publication has followed."""
        step = self._current
        learning = step is not None and self._collected and not self._counts(step)
        return len(self._admitted) + (self._unpublished + learning) * PROMPTS

    @contextmanager
    def step(self) -> Iterator[StepContext]:
        self._note("step")
        if self._current is not None:
            raise PluginBrokenError(
                f"step {self._current.number} is not over; expected its `with` block to end before the next step"
            )
        if self.position.finished:
            raise PluginBrokenError(
                f"step {self._step + 1} can't begin: the run has only {self._total_steps} steps",
                hint="take steps while `not run.position.finished`",
            )
        self._current = step = _context(self._step + 1, self._version)
        try:
            yield step
            if not self._counts(step):
                raise PluginBrokenError(
                    f"step {step.number} ended without `learn`",
                    hint="call run.collect(step) and run.learn(step) in the block",
                )
        finally:
            self._current = None
            undone = step.collected is not None and not self._counts(step)
            if undone and self._generates:
                self._admitted.extendleft(_versions(step.experience.batch()))
            if self._counts(step):
                self._step, self._validated = step.number, True

    def admit(self, groups: int | None = None) -> None:
        self._note("admit")
        if not self._generates:
            return
        count = min(PROMPTS if groups is None else groups, self._left)
        if count <= 0:
            return
        self._check_published()
        outstanding = self._outstanding
        if outstanding + count > (self._max_staleness + 1) * PROMPTS:
            raise PluginBrokenError(
                f"{count} prompts can't be admitted while {outstanding} are outstanding: max_staleness is {self._max_staleness}",
                hint="call run.publish_weights() after each step, and admit as many prompts as a step takes",
            )
        self._admitted.extend([self._version] * count)

    def collect(self, step: StepContext) -> None:
        self._note("collect")
        self._check_current(step)
        if step.collected is not None:
            raise PluginBrokenError(f"run.collect was already called for step {step.number}")
        self._check_published()
        while len(self._admitted) < PROMPTS:
            self._admitted.append(self._version)
        versions = [self._admitted.popleft() for _ in range(PROMPTS)]
        collected = ScriptedExperience.of(_columns(step.number, versions))
        if not self._generates:
            columns = collected.columns.drop(["token_weight_versions", "scores"])
            collected = attrs.evolve(collected, samples=(), columns=columns)
        step.collected = collected

    def learn(self, step: StepContext) -> None:
        self._note("learn")
        self._check_current(step)
        if step.collected is None:
            raise PluginBrokenError(
                f"step {step.number} has no experience", hint="call run.collect(step) first"
            )
        if self._counts(step):
            raise PluginBrokenError(f"run.learn was already called for step {step.number}")
        if self._learn_error is not None and step.number == self._fails_in:
            error, self._learn_error = self._learn_error, None
            raise error
        step.updates["actor"] = 1
        self.learned.append(step.number)
        self._unpublished += 1

    def publish_weights(self) -> None:
        self._note("publish_weights")
        if not self._generates:
            return
        if self._unpublished or not self._published:
            self._published, self._unpublished = True, 0
            self._version += 1

    def validate(self) -> Mapping[str, float]:
        self._note("validate")
        self._check_between_steps("validate")
        if not self._generates:
            return {}
        self._check_published()
        self._validated = True
        return dict(self._validation)

    def save(self) -> None:
        self._note("save")
        self._check_between_steps("save")
        if self._step not in self.saved:
            self.saved.append(self._step)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) == self._stop_at:
            raise StopRequested(f"the run stopped at call {self._stop_at} ({call}), as scripted")

    def _counts(self, step: StepContext) -> bool:
        return step.number in self.learned

    def _check_current(self, step: StepContext) -> None:
        if self._current is None or step is not self._current:
            raise PluginBrokenError(
                "the given step is over or belongs to another run; expected the step of the open `with run.step()` block"
            )

    def _check_published(self) -> None:
        stale = not self._published or self._unpublished > self._max_staleness
        if self._generates and stale:
            raise PluginBrokenError(
                f"the rollout's weights are {self._unpublished} steps old, or none were published yet; "
                f"max_staleness is {self._max_staleness}",
                hint="call run.publish_weights() before the first step and after each learn, or raise max_staleness",
            )

    def _check_between_steps(self, method: str) -> None:
        if self._current is not None:
            raise PluginBrokenError(
                f"step {self._current.number} is not over; expected run.{method}() after its `with` block"
            )


def _context(number: int, version: int) -> StepContext:
    config = RunConfig(model=ModelSection(path="tiny"))
    return StepContext(
        number=number,
        facts=PlanFacts(config=config, plugins={}, updates_per_step=1),
        roles={},
        plugins={},
        logger=logging.getLogger("dovetail"),
        timer=lambda _: nullcontext(),
        weight_version=version,
    )


def _columns(number: int, versions: Sequence[int]) -> Batch:
    """Return the batch of a step: for each prompt, one sample of two response tokens.

    Args:
        number: the number of the step.
        versions: the weight version that generates each prompt's sample.
    """
    prompts_N = np.arange(PROMPTS) + PROMPTS * (number - 1)
    responses = Ragged.from_list([[5, 6]] * PROMPTS, dtype=np.int64)
    return Batch(
        {
            "sample_id": [f"step-{number}/{row}" for row in range(PROMPTS)],
            "epoch": np.zeros(PROMPTS, np.int64),
            "prompt_id": prompts_N,
            "attempt": np.zeros(PROMPTS, np.int64),
            "group_id": np.arange(PROMPTS),
            "prompt_ids": Ragged.from_list([[3, 4]] * PROMPTS, dtype=np.int64),
            "response_ids": responses,
            "response_mask": responses.with_values(np.ones(responses.total, np.bool_)),
            "token_weight_versions": responses.with_values(np.repeat(versions, 2).astype(np.int64)),
            "scores": (prompts_N % 2).astype(np.float32),
        }
    )


def _versions(batch: Batch) -> list[int]:
    """Return the weight version that generated each sample of a step."""
    return [int(versions_T[0]) for versions_T in batch["token_weight_versions"]]
