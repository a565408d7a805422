"""Validation: samples to held-out prompts, and what is said where some of them have no score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from dovetail.interfaces import Failure, Prompt, Sample
from dovetail.sections import RunConfig
from dovetail_rollouts.group import Group
from dovetail_rollouts.rollout_service import RolloutService
from dovetail_rollouts.sampling import validation_sampling


def held_out_samples(
    config: RunConfig,
    prompts: Sequence[Prompt],
    service: RolloutService,
    generated: Callable[[], None] | None = None,
) -> list[Sample]:
    """Generate and score `rollout.validation.n` samples to each prompt, `data.val_batch_size` prompts at once.

    Args:
        config: of the run.
        prompts: held out.
        service: generates and scores.
        generated: called after each batch of prompts.
    """
    n, sampling = config.rollout.validation.n, validation_sampling(config)
    size = config.data.val_batch_size or len(prompts)
    samples: list[Sample] = []
    for start in range(0, len(prompts), size):
        groups = [
            Group(prompt=prompt, n=n, sampling=sampling, purpose="validation")
            for prompt in prompts[start : start + size]
        ]
        service.generate(groups)
        if generated is not None:
            generated()
        samples += [sample for group in groups for sample in group.samples]
    return samples


def unscored(samples: Sequence[Sample]) -> str | None:
    """Return the warning about a validation of which some responses have no score; None where all have one."""
    failures = [s.outcome for s in samples if isinstance(s.outcome, Failure)]
    if not failures:
        return None
    responses = len(samples)
    counts = Counter(failure.kind.value for failure in failures)
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    why = f"({kinds}); the first: {failures[0].message}"
    if len(failures) == responses:
        return f"validation has no metrics: none of its {responses} responses could be scored {why}"
    return f"a validation leaves out {len(failures)} of its {responses} responses, which could not be scored {why}"
