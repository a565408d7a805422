"""Prompts to scored samples, streaming: a sample is scored as soon as it is generated, while others still generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from dovetail.interfaces.reward import Failure, Outcome, RewardSample, Score
from dovetail.interfaces.rollout import Completion, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream

if TYPE_CHECKING:
    from dovetail.data.loader import Issued
    from dovetail.experience.rollout_pool import RolloutPool
    from dovetail.scoring.scorer import Scorer

BASELINE = "baseline"
"""Purpose of the greedy responses: it names their requests and their random streams."""


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """One generated and scored sample, with everything that a person wants to read of it."""

    sample_id: str
    issued: Issued
    group: int
    """Position of its prompt in the step, over all its rounds of generation."""
    completion: Completion
    text: str
    outcome: Outcome

    @property
    def prompt(self) -> Any:
        """The prompt as the data has it: messages, or a string."""
        return self.issued.prompt.raw

    @property
    def score(self) -> float | None:
        """The reward, or None where scoring failed."""
        return self.outcome.value if isinstance(self.outcome, Score) else None

    @property
    def key(self) -> tuple[int, int, int]:
        """Its prompt's name in the ledger: epoch, prompt, attempt."""
        return self.issued.epoch, self.issued.prompt.index, self.issued.attempt

    def row(self) -> dict[str, Any]:
        """What is written to `samples/step_N.jsonl`."""
        prompt = self.issued.prompt
        row = {
            "sample_id": self.sample_id,
            "prompt": prompt.raw,
            "response": self.text,
            "score": self.score,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "finish_reason": str(self.completion.finish_reason),
            "response_length": len(self.completion.response_ids),
        }
        if isinstance(self.outcome, Failure):
            row["failure"] = {"kind": str(self.outcome.kind), "message": self.outcome.message}
            return row
        if self.outcome.components:
            row["components"] = dict(self.outcome.components)
        if self.outcome.extras:
            row["extras"] = dict(self.outcome.extras)
        return row


@attrs.frozen(kw_only=True, eq=False)
class Generated:
    """What one round of generation brought."""

    samples: tuple[Sample, ...]
    """In the order of the prompts, n for each."""
    baselines: tuple[Sample, ...] = ()
    """The greedy response to each prompt, in their order; empty where none were asked for."""


@attrs.frozen(kw_only=True, eq=False)
class _Asked:
    """A request, and whose prompt it answers."""

    group: int
    item: Issued
    request: RolloutRequest


async def generate_and_score(
    issued: Sequence[Issued],
    *,
    n: int | Sequence[int],
    sampling: SamplingParams,
    pool: RolloutPool,
    scorer: Scorer,
    tokenizer: Any,
    seed: int,
    purpose: str = "train",
    first_group: int = 0,
    groups: Sequence[int] | None = None,
    baseline: bool | Sequence[bool] = False,
) -> Generated:
    """Draw n samples a prompt and score each as it arrives.

    Args:
        issued: the prompts.
        n: samples a prompt; or for each prompt how many, where 0 draws none.
        sampling: how their tokens are drawn.
        pool: what generates.
        scorer: what scores.
        tokenizer: turns tokens into the text that is scored.
        seed: of the run.
        purpose: what the samples are for; part of the name of their random streams.
        first_group: number of the first prompt's group; the others follow.
        groups: the number of each prompt's group, in place of `first_group`.
        baseline: draw one greedy response to each prompt too, in the same call of the pool; or for each prompt whether.

    Raises:
        RolloutError: the engine failed and no replica could take over.
    """
    numbers = groups if groups is not None else range(first_group, first_group + len(issued))
    counts = [n] * len(issued) if isinstance(n, int) else n
    ones = [baseline] * len(issued) if isinstance(baseline, bool) else baseline
    asked = _requests(issued, counts, sampling, seed, purpose, numbers)
    greedy = _requests(issued, list(map(int, ones)), greedy_of(sampling), seed, BASELINE, numbers)
    both = asked | greedy

    done: dict[str, tuple[Completion, str]] = {}
    async for completion in pool.generate([entry.request for entry in both.values()]):
        entry = both[completion.request_id]
        prompt = entry.item.prompt
        text = _decode(tokenizer, completion.response_ids)
        sample_id = f"{completion.request_id}.s{completion.sample}"
        done[sample_id] = (completion, text)
        scorer.add(
            RewardSample(
                sample_id=sample_id,
                prompt=prompt.raw,
                solution_str=text,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
                response_ids=completion.response_ids,
                finish_reason=str(completion.finish_reason),
            ),
            group=completion.request_id,
            group_size=entry.request.n,
        )
    outcomes = await scorer.finish()
    return Generated(
        samples=_samples(asked, done, outcomes), baselines=_samples(greedy, done, outcomes)
    )


def greedy_of(sampling: SamplingParams) -> SamplingParams:
    """The same limits and stops, always the likeliest token, and no log-probabilities."""
    return attrs.evolve(
        sampling, temperature=0.0, top_p=1.0, top_k=-1, log_probs=False, raw_log_probs=False
    )


def _requests(
    issued: Sequence[Issued],
    counts: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    purpose: str,
    groups: Sequence[int],
) -> dict[str, _Asked]:
    asked = {}
    for group, item, n in zip(groups, issued, counts, strict=True):
        if not n:
            continue
        name = f"{purpose}.e{item.epoch}.p{item.prompt.index}.a{item.attempt}"
        streams = tuple(
            SampleStream(
                seed=seed,
                purpose=purpose,
                epoch=item.epoch,
                prompt=item.prompt.index,
                sample=sample,
                attempt=item.attempt,
            )
            for sample in range(n)
        )
        request = RolloutRequest(
            request_id=name,
            prompt_ids=item.prompt.prompt_ids,
            sampling=sampling,
            streams=streams,
            media=item.prompt.media,
        )
        asked[name] = _Asked(group=group, item=item, request=request)
    return asked


def _samples(
    asked: Mapping[str, _Asked],
    done: Mapping[str, tuple[Completion, str]],
    outcomes: Mapping[str, Outcome],
) -> tuple[Sample, ...]:
    samples = []
    for name, entry in asked.items():
        for number in range(entry.request.n):
            sample_id = f"{name}.s{number}"
            completion, text = done[sample_id]
            samples.append(
                Sample(
                    sample_id=sample_id,
                    issued=entry.item,
                    group=entry.group,
                    completion=completion,
                    text=text,
                    outcome=outcomes[sample_id],
                )
            )
    return tuple(samples)


def _decode(tokenizer: Any, ids_T: np.ndarray) -> str:
    return str(tokenizer.decode(ids_T.tolist(), skip_special_tokens=True))
