"""Group: a prompt with its samples, and its requests to the pool: for new responses, and for the rest of interrupted responses."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from dovetail.interfaces import Completion, Prompt, RolloutRequest, Sample, SamplingParams
from dovetail.random_streams import SampleStream

BASELINE = "baseline"
"""The `purpose` of greedy responses, which is part of the names of their requests and random streams."""


@attrs.define(kw_only=True, eq=False)
class Group:
    """A prompt during the rollout, with its samples: the unit in which prompts are queued, taken by steps and returned to the queue."""

    prompt: Prompt
    """The prompt; its `attempt` is the number of the group's latest attempt."""
    n: int
    """The number of samples to draw."""
    sampling: SamplingParams
    purpose: str = "train"
    """The purpose of the samples, which is part of the name of their random streams."""
    baseline: bool = False
    """Whether the group also needs a greedy response."""
    samples: list[Sample] = attrs.field(factory=list)
    """The samples so far. In a scored sample, `prompt.attempt` is the group's latest attempt, even if an earlier attempt generated the
    sample; in a failed sample, it is the attempt that failed."""
    greedy: Sample | None = None
    arrived: dict[str, Sample] = attrs.field(factory=dict)
    """Complete responses that are not scored yet, by sample id."""
    cut: dict[str, Completion] = attrs.field(factory=dict)
    """Interrupted responses to be continued, by sample id. A running episode has an entry for each of its turns instead, by the id of
    the turn's request; it holds the response, complete or interrupted, and its `prompt_ids`."""
    finished: bool = False
    """Whether every requested sample has a score or has failed."""
    place: int | None = None
    """The position of the group in the order in which groups start; None before its start. When requests that `Generation.hold` held
    back are sent, the groups that started earlier come first."""
    due: int | None = None
    """The last step that may train on the group, by the bound on staleness; None without a bound."""
    priority: int = 0
    """The priority of the group's requests: the number of the step that trains on the group, if groups are taken in order. 0 if no step
    trains on the group and the trainer waits, as in validation."""

    def missing(self) -> tuple[int, bool]:
        """Return how many samples are still to be drawn, and whether the greedy response is still to be drawn."""
        missing = self.n - sum(sample.score is not None for sample in self.samples)
        return missing, self.baseline and (self.greedy is None or self.greedy.score is None)

    def anew(self) -> Group:
        """Return a copy of the group with the same prompt and attempt, but without any samples or responses."""
        return attrs.evolve(self, samples=[], greedy=None, arrived={}, cut={}, finished=False)

    def try_again(self, *, whole: bool) -> None:
        """Start the next attempt, which generates only the samples without a score again.

        Args:
            whole: whether all samples are generated again if a single one lacks a score, because their scores depend on each other.
        """
        self.finished = False
        self.prompt = attrs.evolve(self.prompt, attempt=self.prompt.attempt + 1)
        anew = whole and self.missing()[0] > 0
        self.samples = [
            sample if sample.score is None else attrs.evolve(sample, prompt=self.prompt)
            for sample in self.samples
            if sample.score is None or not anew
        ]


def sample_name(request: RolloutRequest, number: int) -> str:
    """Return the id of the sample with index `number` among the samples of a request."""
    return f"{request.request_id}.s{number}"


def missing_parts(
    request: RolloutRequest, names: Sequence[str], group: Group
) -> list[tuple[RolloutRequest, Sequence[int]]]:
    """Return requests for the samples of a group that have not arrived, each with the indices of its samples in `names`.

    One request is for all samples without a token. Each interrupted response has a request that continues its tokens.

    Args:
        request: the request for all missing samples of the group.
        names: the ids of these samples.
        group: the samples that have arrived, and the responses that were interrupted.
    """
    left = [number for number, name in enumerate(names) if name not in group.arrived]
    begin = [number for number in left if names[number] not in group.cut]
    parts: list[tuple[RolloutRequest, Sequence[int]]] = []
    if len(begin) == request.n:
        parts.append((request, begin))
    elif begin:
        streams = tuple(request.streams[number] for number in begin)
        request_id = f"{request.request_id}.rest"
        parts.append((attrs.evolve(request, request_id=request_id, streams=streams), begin))
    for number in left:
        if (cut := group.cut.get(names[number])) is None:
            continue
        parts.append((rest_of(request, names[number], number, cut), [number]))
    return parts


def rest_of(request: RolloutRequest, name: str, number: int, cut: Completion) -> RolloutRequest:
    """Return a request for the remaining tokens of an interrupted sample.

    Args:
        request: the request to which the sample belongs.
        name: the sample's id, from which the id of the new request is derived.
        number: the index of the sample among the request's samples.
        cut: the sample's tokens so far, which the new request appends to the prompt.
    """
    done = len(cut.response_ids)
    limit = request.sampling.max_new_tokens - done
    return attrs.evolve(
        request,
        request_id=f"{name}.from{done}",
        prompt_ids=np.concatenate([request.prompt_ids, cut.response_ids]),
        sampling=attrs.evolve(request.sampling, max_new_tokens=limit),
        streams=(attrs.evolve(request.streams[number], offset=done),),
    )


def kept_of(cut: Completion, sampling: SamplingParams) -> Completion | None:
    """Return an interrupted response without its last tokens, in which a stop string may have begun; None if no token is left."""
    count = len(cut.response_ids) - max(map(len, sampling.stop), default=0)
    if count <= 0:
        return None
    return attrs.evolve(
        cut,
        response_ids=cut.response_ids[:count],
        weight_versions=cut.weight_versions[:count],
        log_probs=None if cut.log_probs is None else cut.log_probs[:count],
        raw_log_probs=None if cut.raw_log_probs is None else cut.raw_log_probs[:count],
    )


def requests_of(group: Group, seed: int) -> tuple[RolloutRequest | None, RolloutRequest | None]:
    """Return the request for the missing samples of a group, and the request for its greedy response; each is None if nothing is missing."""
    missing, greedy = group.missing()
    return (
        _request(group, missing, group.sampling, group.purpose, seed) if missing else None,
        _request(group, 1, greedy_of(group.sampling), BASELINE, seed) if greedy else None,
    )


def greedy_of(sampling: SamplingParams) -> SamplingParams:
    """Return greedy sampling parameters with the same limits and stops, and without log-probabilities."""
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
        priority=group.priority,
    )
