"""Prompts to scored samples, streaming: a sample is scored as soon as it is generated, while others still generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.interfaces.reward import Failure, Outcome, RewardSample, Score
from dovetail.interfaces.rollout import Completion, RolloutRequest, SamplingParams
from dovetail.numerics.streams import SampleStream

if TYPE_CHECKING:
    from dovetail.data.loader import Issued
    from dovetail.flow.rollout_pool import RolloutPool
    from dovetail.flow.scorer import Scorer


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """One generated and scored sample, with everything that a person wants to read of it."""

    sample_id: str
    issued: Issued
    group: int
    """Position of its prompt in the step."""
    completion: Completion
    text: str
    outcome: Outcome

    @property
    def score(self) -> float | None:
        """The reward, or None where scoring failed."""
        return self.outcome.value if isinstance(self.outcome, Score) else None

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
        elif self.outcome.components:
            row["components"] = dict(self.outcome.components)
        return row


async def generate_and_score(
    issued: Sequence[Issued],
    *,
    n: int,
    sampling: SamplingParams,
    pool: RolloutPool,
    scorer: Scorer,
    tokenizer: Any,
    seed: int,
    purpose: str = "train",
) -> list[Sample]:
    """Draw n samples a prompt and score each as it arrives.

    Returns:
        The samples in the order of the prompts, n for each.

    Raises:
        RolloutError: the engine failed and no replica could take over.
    """
    requests = {}
    for group, item in enumerate(issued):
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
            request_id=name, prompt_ids=item.prompt.prompt_ids, sampling=sampling, streams=streams
        )
        requests[name] = (group, item, request)

    done: dict[str, tuple[Completion, str]] = {}
    async for completion in pool.generate([request for _, _, request in requests.values()]):
        group, item, _ = requests[completion.request_id]
        text = _decode(tokenizer, completion.response_ids)
        sample_id = f"{completion.request_id}.s{completion.sample}"
        done[sample_id] = (completion, text)
        scorer.add(
            RewardSample(
                sample_id=sample_id,
                prompt=item.prompt.raw,
                solution_str=text,
                data_source=item.prompt.data_source,
                ground_truth=item.prompt.ground_truth,
                extra_info=item.prompt.extra_info,
                response_ids=completion.response_ids,
                finish_reason=str(completion.finish_reason),
            ),
            group=completion.request_id,
            group_size=n,
        )
    outcomes = await scorer.finish()
    samples = []
    for name, (group, item, _) in requests.items():
        for i in range(n):
            sample_id = f"{name}.s{i}"
            completion, text = done[sample_id]
            samples.append(
                Sample(
                    sample_id=sample_id,
                    issued=item,
                    group=group,
                    completion=completion,
                    text=text,
                    outcome=outcomes[sample_id],
                )
            )
    return samples


def _decode(tokenizer: Any, ids_T: np.ndarray) -> str:
    return str(tokenizer.decode(ids_T.tolist(), skip_special_tokens=True))


def to_batch(samples: Sequence[Sample], *, temperature: float) -> Batch:
    """The columns of the samples that have a score; failures have no place in a batch.

    A scalar reward sits on the last token of the response.
    """
    scored = [s for s in samples if isinstance(s.outcome, Score)]
    completions = [s.completion for s in scored]
    responses = Ragged.from_list([c.response_ids for c in completions], dtype=np.int64)
    columns: dict[str, Any] = {
        "sample_id": [s.sample_id for s in scored],
        "epoch": np.array([s.issued.epoch for s in scored], dtype=np.int64),
        "prompt_id": np.array([s.issued.prompt.index for s in scored], dtype=np.int64),
        "attempt": np.array([s.issued.attempt for s in scored], dtype=np.int64),
        "sample_index": np.array([c.sample for c in completions], dtype=np.int64),
        "group_id": np.array([s.group for s in scored], dtype=np.int64),
        "trajectory_id": np.arange(len(scored), dtype=np.int64),
        "prompt_ids": Ragged.from_list(
            [s.issued.prompt.prompt_ids for s in scored], dtype=np.int64
        ),
        "response_ids": responses,
        "response_mask": responses.with_values(np.ones(len(responses.values), dtype=np.bool_)),
        "token_weight_versions": Ragged.from_list(
            [c.weight_versions for c in completions], dtype=np.int64
        ),
        "finish_reason": [str(c.finish_reason) for c in completions],
        "temperature": np.full(len(scored), temperature, dtype=np.float32),
        "scores": np.array([s.score for s in scored], dtype=np.float32),
        "token_rewards": _token_rewards(scored, responses),
        "reward_components": [dict(s.outcome.components) for s in scored],  # type: ignore[union-attr]
    }
    for column, field in (
        ("rollout_log_probs", "log_probs"),
        ("raw_rollout_log_probs", "raw_log_probs"),
    ):
        rows = [getattr(c, field) for c in completions]
        if rows and all(row is not None for row in rows):
            columns[column] = Ragged.from_list(rows, dtype=np.float32)
    return Batch(columns)


def _token_rewards(scored: Sequence[Sample], responses: Ragged) -> Ragged:
    rows = []
    for sample, length in zip(scored, responses.lengths, strict=True):
        outcome = sample.outcome
        if isinstance(outcome, Score) and outcome.token_rewards is not None:
            rows.append(outcome.token_rewards)
            continue
        row = np.zeros(length, dtype=np.float32)
        if length:
            row[-1] = sample.score
        rows.append(row)
    return Ragged.from_list(rows, dtype=np.float32)


def rollout_metrics(samples: Sequence[Sample], max_response_length: int) -> dict[str, float]:
    """Figures of one step's samples, in the field's names."""
    scores = np.array([s.score for s in samples if s.score is not None], dtype=np.float64)
    lengths = np.array([len(s.completion.response_ids) for s in samples], dtype=np.float64)
    prompts = np.array([len(s.issued.prompt.prompt_ids) for s in samples], dtype=np.float64)
    clipped = np.array([str(s.completion.finish_reason) == "length" for s in samples])
    metrics = {
        "reward/failures": float(len(samples) - len(scores)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(clipped.mean()),
        "response_length/limit": float(max_response_length),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
    }
    if len(scores):
        metrics |= {
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std()),
            "reward/min": float(scores.min()),
            "reward/max": float(scores.max()),
        }
    names = {n for s in samples if isinstance(s.outcome, Score) for n in s.outcome.components}
    for name in sorted(names):
        parts = [
            s.outcome.components[name]
            for s in samples
            if isinstance(s.outcome, Score) and name in s.outcome.components
        ]
        metrics[f"reward/components/{name}"] = float(np.mean(parts))
    for kind in {s.outcome.kind for s in samples if isinstance(s.outcome, Failure)}:
        metrics[f"reward/failures/{kind}"] = float(
            sum(isinstance(s.outcome, Failure) and s.outcome.kind == kind for s in samples)
        )
    return metrics
