"""SpinPairs: pairs of a dataset's response and the policy's own (SPIN, arXiv 2401.01335). N samples, P pairs, T response tokens, packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import DataError
from dovetail.interfaces import PlanFacts, PluginConfig, Prompt, Stage, StepContext
from dovetail_datasets import TextEncoder


class SpinPairs(Stage):
    """Pairs each answer of the policy (rejected) with the dataset's response to the same prompt (chosen).

    The dataset's column `response` holds text, which is tokenised and followed by the end-of-sequence token. An answer has no pair if it
    equals the dataset's response, or if that response has more than `data.max_response_length` tokens. Rewards are only logged.

    In a config:

        actor: {objective: {name: dpo, beta: 0.1}}
        algorithm: {stages: [spin_pairs]}
        ref: {update: {every: 500}}
    """

    name = "spin_pairs"
    api = ">=1.1,<2"
    capabilities = frozenset({"deterministic"})
    phase = "score"
    before = ("old_log_probs_from_rollout", "score_actor", "score_ref", "score_critic")
    changes_samples = True

    @classmethod
    def requires(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the columns with the policy's responses, from which pairs are formed."""
        return frozenset(
            {"response_ids", "response_mask", "token_weight_versions", "trajectory_id"}
        )

    @classmethod
    def provides(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset({"pair_id", "chosen"})

    def run(self, batch: Batch, step: StepContext) -> Batch:
        """Return the batch of pairs. Metrics: `reward/pairs` counts the pairs; `reward/equal_answers` and `reward/overlong_responses`
        count the samples without a pair, because the answer equals the dataset's response or because that response is too long.

        Raises:
            DataError: a prompt has no response in the dataset.
        """
        given = self._responses(batch, step)
        limit = step.config.data.max_response_length
        short = [len(ids) <= limit for ids in given]
        other = [not np.array_equal(*two) for two in zip(given, batch["response_ids"], strict=True)]
        rows_P = np.flatnonzero(np.array(short) & np.array(other))
        step.metrics |= {
            "reward/pairs": float(len(rows_P)),
            "reward/equal_answers": float(other.count(False)),
            "reward/overlong_responses": float(short.count(False)),
        }
        own = batch.take(rows_P)
        pairs = Batch.concat([_answered(own, [given[row] for row in rows_P.tolist()]), own])
        order_P2 = np.arange(2 * len(rows_P)).reshape(2, -1).T
        return pairs.take(order_P2.ravel()).with_columns(
            {
                "pair_id": np.repeat(np.arange(len(rows_P)), 2),
                "chosen": np.tile(np.array([True, False]), len(rows_P)),
            }
        )

    def _responses(self, batch: Batch, step: StepContext) -> list[list[int]]:
        """Return the token ids of the dataset's response to each sample's prompt."""
        prompts = {sample.prompt.key: sample.prompt for sample in step.experience.samples}
        keys = list(
            zip(*(batch[name].tolist() for name in ("epoch", "prompt_id", "attempt")), strict=True)
        )
        section = step.config.data
        # If prompts are raw text, responses are raw text too: control tokens in them are allowed.
        raw = section.plain_prompts == "raw"
        encoder = TextEncoder(self.context.tokenizer, "allow" if raw else section.control_tokens)
        tokens = {key: self._tokens(prompts[key], encoder) for key in set(keys)}
        return [tokens[key] for key in keys]

    def _tokens(self, prompt: Prompt, encoder: TextEncoder) -> list[int]:
        if not prompt.response:
            raise DataError(
                f"{prompt} has no response in the dataset; the stage 'spin_pairs' needs one to pair with the policy's response",
                hint="give every row a text in the column `response`",
            )
        [ids] = encoder.ids([encoder.given(prompt.response, "assistant")])
        return [*ids, encoder.tokenizer.eos_token_id]


def _answered(own: Batch, responses: list[list[int]]) -> Batch:
    """Return the samples with the dataset's `responses` (token ids) in place of their own.

    Since the rollout did not generate these responses, their weight versions are −1, and their scores and log-probabilities are 0.
    """
    ids = Ragged.from_list(responses, np.int64)
    tokens = len(ids.values)
    columns: dict[str, Any] = {
        name: ids.with_values(np.zeros((tokens, *column.inner), column.dtype))
        for name, column in own.columns.items()
        if isinstance(column, Ragged) and name != "prompt_ids"
    }
    last = int(own["trajectory_id"].max(initial=-1))
    columns |= {
        "response_ids": ids,
        "response_mask": ids.with_values(np.ones(tokens, np.bool_)),
        "token_weight_versions": ids.with_values(np.full(tokens, -1, np.int64)),
        "trajectory_id": last + 1 + np.arange(len(own)),
        "sample_id": [f"{name}/dataset" for name in own["sample_id"]],
        "scores": np.zeros(len(own), np.float32),
    }
    return own.with_columns(columns)
