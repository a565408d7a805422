"""Prompts to scored samples, streaming: a sample is scored as soon as it is generated, while others still generate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, aclosing
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.interfaces.reward import Sample
from dovetail.interfaces.rollout import RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream

if TYPE_CHECKING:
    from dovetail.experience.rollout_pool import RolloutPool
    from dovetail.interfaces.data import Prompt
    from dovetail.scoring.scorer import Scorer

Drawing = asyncio.Task[list[Sample]] | None
"""Samples that are being drawn; None where none are."""
BASELINE = "baseline"
"""Purpose of the greedy responses: it names their requests and their random streams."""


@attrs.define(kw_only=True, eq=False)
class Group:
    """A prompt on its way through the rollout, with the samples drawn for it: the unit of the ledger and of the stream."""

    prompt: Prompt
    """Under its latest attempt."""
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
        self.prompt = attrs.evolve(self.prompt, attempt=self.prompt.attempt + 1)
        anew = whole and self.lacks()[0] > 0
        self.samples = [
            sample if sample.score is None else attrs.evolve(sample, prompt=self.prompt)
            for sample in self.samples
            if sample.score is None or not anew
        ]


def begin(
    groups: Sequence[Group],
    *,
    pool: RolloutPool,
    scorer: Scorer,
    tokenizer: Any,
    seed: int,
    generating: AbstractContextManager[object],
) -> list[asyncio.Task[None]]:
    """Begin to draw what groups lack, on the running event loop: all their samples before the first greedy response.

    Args:
        groups: with or without samples.
        pool: what generates.
        scorer: scores each sample as soon as it has arrived.
        tokenizer: turns tokens into the text that is scored.
        seed: of the run.
        generating: is entered until the last sample of a request has arrived.

    Returns:
        For each group what waits for its samples and gives them to it. It raises RolloutError where the engine failed and no
        replica could take over.
    """

    def start(group: Group, request: RolloutRequest | None) -> Drawing:
        if request is None:
            return None
        return asyncio.create_task(
            _draw(request, group.prompt, pool, scorer, tokenizer, generating)
        )

    asked = [_requests(group, seed) for group in groups]
    samples = [start(group, request) for group, (request, _) in zip(groups, asked, strict=True)]
    greedy = [start(group, request) for group, (_, request) in zip(groups, asked, strict=True)]
    return [_whole(*parts) for parts in zip(groups, samples, greedy, strict=True)]


def _whole(group: Group, samples: Drawing, greedy: Drawing) -> asyncio.Task[None]:
    def end(_: asyncio.Task[None]) -> None:
        for part in filter(None, (samples, greedy)):
            part.cancel()

    task = asyncio.create_task(_complete(group, samples, greedy))
    task.add_done_callback(end)  # also where it is cancelled before its first turn
    return task


async def _complete(group: Group, samples: Drawing, greedy: Drawing) -> None:
    parts = [part for part in (samples, greedy) if part is not None]
    try:
        await asyncio.gather(*parts)
        group.samples += samples.result() if samples else []
        group.greedy = greedy.result()[0] if greedy else group.greedy
        group.finished = True
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


def _requests(group: Group, seed: int) -> tuple[RolloutRequest | None, RolloutRequest | None]:
    """The request for the samples that a group lacks, and the one for its greedy response."""
    missing, greedy = group.lacks()
    return (
        _request(group, missing, group.sampling, group.purpose, seed) if missing else None,
        _request(group, 1, greedy_of(group.sampling), BASELINE, seed) if greedy else None,
    )


async def _draw(
    request: RolloutRequest,
    prompt: Prompt,
    pool: RolloutPool,
    scorer: Scorer,
    tokenizer: Any,
    generating: AbstractContextManager[object],
) -> list[Sample]:
    """The samples of a request, each scored as soon as it has arrived."""
    done = dict[str, Sample]()
    try:
        with generating:
            async with aclosing(pool.submit(request)) as completions:
                async for completion in completions:
                    ids_T = completion.response_ids.tolist()
                    text = str(tokenizer.decode(ids_T, skip_special_tokens=True))
                    sample_id = f"{request.request_id}.s{completion.sample}"
                    done[sample_id] = Sample(
                        sample_id=sample_id, prompt=prompt, text=text, completion=completion
                    )
                    scorer.add(
                        done[sample_id],
                        group=request.request_id,
                        group_size=request.n,
                    )
        outcomes = await scorer.outcomes(list(done))
    except BaseException:
        # The prompt is asked again under the same names: these must not be scored any more.
        await scorer.forget(list(done))
        raise
    return [
        attrs.evolve(done[name], outcome=outcomes[name])
        for name in (f"{request.request_id}.s{number}" for number in range(request.n))
    ]


def greedy_of(sampling: SamplingParams) -> SamplingParams:
    """The same limits and stops, always the likeliest token, and no log-probabilities."""
    return attrs.evolve(
        sampling, temperature=0.0, top_p=1.0, top_k=-1, log_probs=False, raw_log_probs=False
    )


def _request(
    group: Group, n: int, sampling: SamplingParams, purpose: str, seed: int
) -> RolloutRequest:
    prompt = group.prompt
    streams = tuple(
        SampleStream(
            seed=seed,
            purpose=purpose,
            epoch=prompt.epoch,
            prompt=prompt.index,
            sample=sample,
            attempt=prompt.attempt,
        )
        for sample in range(n)
    )
    return RolloutRequest(
        request_id=f"{purpose}.e{prompt.epoch}.p{prompt.index}.a{prompt.attempt}",
        prompt_ids=prompt.prompt_ids,
        sampling=sampling,
        streams=streams,
        media=prompt.media,
    )
