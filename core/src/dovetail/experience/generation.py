"""Prompts to scored samples, streaming: a sample is scored as soon as it is generated, while others still generate."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

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
    completion: Completion
    text: str
    outcome: Outcome
    group: int = 0
    """Position of its prompt in the step, over all its rounds of generation."""

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


@attrs.define(kw_only=True, eq=False)
class Group:
    """A prompt on its way through the rollout, with the samples drawn for it: the unit of the ledger and of the stream."""

    issued: Issued
    """The prompt under its latest attempt."""
    n: int
    """Samples wanted."""
    sampling: SamplingParams
    purpose: str = "train"
    """What the samples are for; part of the name of their random streams."""
    baseline: bool = False
    """Whether a greedy response is wanted, too."""
    samples: list[Sample] = attrs.field(factory=list)
    """Sound ones under the latest attempt, those that could not be scored under the one that they had."""
    greedy: Sample | None = None
    finished: bool = False
    """Whether everything that was asked for has an outcome."""

    def lacks(self) -> tuple[int, bool]:
        """Return how many samples are still to be drawn, and whether the greedy response is."""
        missing = self.n - sum(sample.score is not None for sample in self.samples)
        return missing, self.baseline and (self.greedy is None or self.greedy.score is None)

    def try_again(self, *, whole: bool) -> None:
        """Go on to the next attempt, which keeps the samples that have a score.

        Args:
            whole: it keeps none where one is missing, because scores depend on each other.
        """
        self.finished = False
        self.issued = attrs.evolve(self.issued, attempt=self.issued.attempt + 1)
        anew = whole and self.lacks()[0] > 0
        self.samples = [
            sample if sample.score is None else attrs.evolve(sample, issued=self.issued)
            for sample in self.samples
            if sample.score is None or not anew
        ]


async def draw(
    group: Group,
    *,
    pool: RolloutPool,
    scorer: Scorer,
    tokenizer: Any,
    seed: int,
    generating: AbstractContextManager[object],
) -> None:
    """Draw what a group lacks, and score each sample as it arrives.

    Args:
        group: gets the samples once all of them have an outcome.
        pool: what generates.
        scorer: what scores.
        tokenizer: turns tokens into the text that is scored.
        seed: of the run.
        generating: around what comes before the last sample's outcome is waited for.

    Raises:
        RolloutError: the engine failed and no replica could take over.
    """
    missing, greedy = group.lacks()
    requests = [_request(group, missing, group.sampling, group.purpose, seed)] if missing else []
    if greedy:
        requests.append(_request(group, 1, greedy_of(group.sampling), BASELINE, seed))
    prompt, done = group.issued.prompt, dict[str, tuple[Completion, str]]()
    try:
        with generating:
            async for completion in pool.generate(requests):
                [request] = [r for r in requests if r.request_id == completion.request_id]
                text = str(
                    tokenizer.decode(completion.response_ids.tolist(), skip_special_tokens=True)
                )
                sample_id = _sample_id(request, completion.sample)
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
                    group=request.request_id,
                    group_size=request.n,
                )
        outcomes = await scorer.outcomes(list(done))
    except BaseException:
        # The group is drawn again under the same names: these must not be scored any more.
        await scorer.forget(list(done))
        raise
    for request in requests:
        names = [_sample_id(request, number) for number in range(request.n)]
        samples = [
            Sample(
                sample_id=name,
                issued=group.issued,
                completion=done[name][0],
                text=done[name][1],
                outcome=outcomes[name],
            )
            for name in names
        ]
        if request.streams[0].purpose == BASELINE:
            [group.greedy] = samples
        else:
            group.samples += samples
    group.finished = True


def greedy_of(sampling: SamplingParams) -> SamplingParams:
    """The same limits and stops, always the likeliest token, and no log-probabilities."""
    return attrs.evolve(
        sampling, temperature=0.0, top_p=1.0, top_k=-1, log_probs=False, raw_log_probs=False
    )


def _request(
    group: Group, n: int, sampling: SamplingParams, purpose: str, seed: int
) -> RolloutRequest:
    issued = group.issued
    streams = tuple(
        SampleStream(
            seed=seed,
            purpose=purpose,
            epoch=issued.epoch,
            prompt=issued.prompt.index,
            sample=sample,
            attempt=issued.attempt,
        )
        for sample in range(n)
    )
    return RolloutRequest(
        request_id=f"{purpose}.e{issued.epoch}.p{issued.prompt.index}.a{issued.attempt}",
        prompt_ids=issued.prompt.prompt_ids,
        sampling=sampling,
        streams=streams,
        media=issued.prompt.media,
    )


def _sample_id(request: RolloutRequest, number: int) -> str:
    return f"{request.request_id}.s{number}"
