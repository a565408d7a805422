"""WeightCheck: compares the log-probabilities of rollout and trainer on fixed token sequences.

Digests prove that weights arrived, but engines then fuse, shard, prepack and quantise them. Log-probabilities show whether
a replica computes with the weights. Legend: S sequences of L tokens.

Rounding moves the log-probability of an unlikely token most: on random tokens two correct engines in bfloat16 differ
by more than wrong weights may. So the sequences are the run's own prompts, and every token is weighted by the trainer's
probability of it. The sequences depend on data and config alone: a resumed run has the same sequences, and the check uses
no random stream and no position in the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import WeightSyncError
from dovetail.interfaces import Logger, Prompt, Tokenizer
from dovetail.planning import Plan
from dovetail.sections import RunConfig, WeightCheckSection
from dovetail_rollouts.replica_states import ReplicaFault, describe

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean difference (see `difference`) by the model's dtype, in nats a token."""


class WeightCheck:
    """Compares the log-probabilities of replicas with the trainer's, to verify that replicas use the weights that they were sent.

    Args:
        section: the config of the check: how often, and on how many tokens.
        sequences: S sequences, int64 [L] each; empty for no check.
        dtype: the dtype of the model, for the tolerance.
    """

    def __init__(
        self, section: WeightCheckSection, sequences: Sequence[np.ndarray], dtype: str = "float32"
    ) -> None:
        self._section, self._sequences, self._dtype = section, list(sequences), dtype
        self._checked = False

    @classmethod
    def of(
        cls,
        config: RunConfig,
        plan: Plan,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        logger: Logger,
    ) -> WeightCheck:
        """Make the check of a run, on the first training prompts.

        Nothing is checked if the engine can't score tokens, or if `rollout.weight_check.every` is 0. If these prompts have no text, nothing
        is checked, and a warning is logged.
        """
        section = config.rollout.weight_check
        if "scores" not in plan.facts.plugins["rollout"].cls.capabilities or not section.every:
            return cls(section, ())
        # One token less, since an engine that scores a prompt may have to generate a token after it.
        room = config.data.max_prompt_length + config.data.max_response_length - 1
        length = max(min(section.tokens, room), 2)
        sequences = join_prompts(prompts, section.sequences, length, tokenizer.all_special_ids)
        if not sequences:
            logger.warning(
                "the weight check has no text to score: the first training prompts contain only images. So it does not check that "
                "replicas compute with the weights that they are sent",
                hint="add text to the first prompts, or set rollout.weight_check.every=0",
            )
        return cls(section, sequences, config.model.dtype)

    @property
    def possible(self) -> bool:
        """Whether there are sequences to check."""
        return bool(self._sequences)

    @property
    def tolerance(self) -> float:
        """Largest mean difference that passes the check, in nats per token."""
        return self._section.tolerance or TOLERANCES[self._dtype]

    def due(self, version: int) -> bool:
        """Return whether to check the update to this version: every `every`-th version, and any version until this process made a check."""
        if not self.possible:
            return False
        return not self._checked or (version - 1) % self._section.every == 0

    def expect(self, actor: Any) -> list[np.ndarray]:
        """Return the trainer's log-probabilities: float32 [L − 1] for each sequence, nats at temperature 1."""
        responses = Ragged.from_list([ids_L[1:] for ids_L in self._sequences], dtype=np.int64)
        batch = Batch(
            {
                "prompt_ids": Ragged.from_list(
                    [ids_L[:1] for ids_L in self._sequences], dtype=np.int64
                ),
                "response_ids": responses,
                "response_mask": responses.with_values(
                    np.ones(len(responses.values), dtype=np.bool_)
                ),
                "temperature": np.ones(len(self._sequences), dtype=np.float32),
            }
        )
        scored = actor.forward(batch, frozenset({"log_probs"})).result()["log_probs"]
        return [np.asarray(row, dtype=np.float32) for row in scored]

    def compare(
        self,
        expected: Sequence[np.ndarray],
        score: Callable[[Sequence[np.ndarray]], Mapping[int, list[np.ndarray] | Exception]],
    ) -> tuple[dict[str, float], tuple[ReplicaFault, ...]]:
        """Compare the log-probabilities of every replica, as `score` returns them, with the trainer's.

        Args:
            expected: the trainer's log-probabilities, float32 [L − 1] for each of the S sequences.
            score: a function from the sequences, int64 [L] each, to every replica's log-probabilities, in the form of
                `expected`, or its error.

        Returns:
            The largest `weight_check/mean_difference` and `weight_check/max_difference` of all replicas; and the faults of
            replicas whose mean difference is above the tolerance, or that could not score.
        """
        means, largest, faults = [0.0], [0.0], []
        for number, found in score(self._sequences).items():
            if isinstance(found, Exception):
                faults.append(ReplicaFault(number=number, error=self._unscored(number, found)))
                continue
            mean, most = difference(expected, found)
            means.append(mean)
            largest.append(most)
            if not mean <= self.tolerance:
                faults.append(
                    ReplicaFault(number=number, error=self._too_different(number, mean, most))
                )
        self._checked = True
        figures = {
            "weight_check/mean_difference": float(np.max(means)),
            "weight_check/max_difference": float(np.max(largest)),
        }
        return figures, tuple(faults)

    def _too_different(self, number: int, mean: float, most: float) -> WeightSyncError:
        return WeightSyncError(
            f"replica {number} does not compute with the weights that it was sent: its log-probabilities of the "
            f"check's sequences differ from the trainer's by {mean:.3g} nats a token on average (at most {most:.3g}); "
            f"rollout.weight_check.tolerance allows {self.tolerance:g} on average ({self._dtype})",
            hint="if the engine quantises, raise rollout.weight_check.tolerance; otherwise the engine loads weights wrongly: "
            "report this to the author of its plugin, or set rollout.weight_check.every=0 to run without this check",
        )

    def _unscored(self, number: int, error: Exception) -> WeightSyncError:
        failure = WeightSyncError(
            f"replica {number} could not score the sequences of the weight check after the update: {describe(error)}",
            hint="set rollout.weight_check.every=0 to run without this check",
        )
        failure.__cause__ = error
        return failure


def difference(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> tuple[float, float]:
    """Compare log-probabilities of the same tokens, in nats; NaN and wrong shapes give infinite differences.

    Args:
        expected: the trainer's log-probabilities, float32 [L − 1] for each of S sequences.
        found: a replica's log-probabilities, in the same form.

    Returns:
        The weighted mean Σ p |Δ| / Σ p over all tokens, with differences Δ and the trainer's probabilities p; and the
        largest |Δ|.
    """
    if [len(row) for row in expected] != [len(row) for row in found]:
        return math.inf, math.inf
    trainer = np.concatenate(list(expected), dtype=np.float64)
    apart = np.abs(trainer - np.concatenate(list(found)))
    if not np.isfinite(apart).all():
        return math.inf, math.inf
    # Relative to the likeliest token, since exp would underflow if all tokens were very unlikely.
    return float(np.average(apart, weights=np.exp(trainer - trainer.max()))), float(apart.max())


def join_prompts(
    prompts: Sequence[Prompt], sequences: int, tokens: int, special: Collection[int]
) -> list[np.ndarray]:
    """Concatenate prompts to S sequences: sequence s holds prompts s, s + S, s + 2S, …, starting over after the last prompt.

    Every sequence starts at the beginning of a prompt, since some models predict badly without the token that begins a text.

    Args:
        prompts: at least one prompt, of at least one token each.
        sequences: S, the number of sequences.
        tokens: L, the number of tokens of each sequence.
        special: ids of tokens to leave out of prompts with images, since one placeholder token stands for several tokens of an image.

    Returns:
        S arrays, int64 [L]; shorter or fewer only if prompts have nothing but images.
    """
    found = []
    for s in range(sequences):
        ids: list[int] = []
        # A prompt has at least one token, so `tokens` prompts suffice, unless they hold only images and special tokens.
        for number in range(s, s + sequences * tokens, sequences):
            prompt = prompts[number % len(prompts)]
            ids += [i for i in prompt.prompt_ids.tolist() if not (prompt.media and i in special)]
            if len(ids) >= tokens:
                break
        found.append(np.array(ids[:tokens], dtype=np.int64))
    return [ids_L for ids_L in found if len(ids_L) >= 2]
