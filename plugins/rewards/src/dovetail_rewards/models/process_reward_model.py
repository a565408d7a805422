"""The reward manager `process_reward_model`: a model in this process scores every step of a response (arXiv 2305.20050, 2312.08935)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.interfaces import FailureKind, Outcome, Sample, Tokenizer
from dovetail_rewards.model_config import ProcessRewardModelConfig
from dovetail_rewards.models.reward_model import (
    ModelText,
    RewardModelManager,
    load_tokenizer,
    longest,
    model_failure,
)
from dovetail_rollouts import outcome_from

RUNNING: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "min": np.minimum.accumulate,
    "last": lambda p_S: p_S,
    "prod": np.cumprod,
    "mean": lambda p_S: np.cumsum(p_S) / np.arange(1, len(p_S) + 1),
    "sum": np.cumsum,
}
"""Function for each value of the option `aggregate`: from the probabilities of S steps, [S], it returns the scores of the first step,
the first two steps, and so on, float64 [S]."""


class ProcessRewardModelManager(RewardModelManager):
    """Scores single samples by one forward pass of a process reward model over prompt and steps.

    The model gives the probability p_k that step k is right. The score is the minimum, last, product, mean or sum of the p_k (`aggregate`).
    With `rewards: steps`, the last token of step k is rewarded with A_k − A_{k−1}, where A_k is the score of the first k steps and A_0 = 0.
    The rewards of a response add up to its score. More steps alone gain nothing, except under `sum`, where each step's reward is p_k.

    The components are `steps` (the number of steps), `step_min`, `step_mean` and `step_last`; the run's sample files also
    contain every p_k. A sample fails for the reasons of `reward_model`, and if the response contains the step token.

    In a config:

        reward: {manager: {name: process_reward_model, model: Qwen/Qwen2.5-Math-PRM-7B, trust_remote_code: true, rewards: steps}}
    """

    name = "process_reward_model"
    Config = ProcessRewardModelConfig  # type: ignore[assignment]
    config: ProcessRewardModelConfig

    def start(self) -> None:
        """Load the model and its tokenizer.

        Raises:
            ConfigError: model or tokenizer can't be loaded, or the model is not a process reward model.
        """
        from dovetail_rewards.models.step_model import StepClassifier, StepLanguageModel, StepReader

        tokenizer = load_tokenizer(self.config)
        if self.config.head == "classifier":
            self._model = StepClassifier(self.config)
        else:
            self._model = StepLanguageModel(self.config, tokenizer)
        self._reader = StepReader(self.config, tokenizer, longest(self._model, tokenizer))

    def judge(self, text: ModelText, logit: Any) -> Outcome:
        """Return the score of a text, or its failure.

        Args:
            text: the text, with its sample.
            logit: the probability that each of the S steps is right, float [S]. The argument is named after that of the base
                class, for which it is one logit.
        """
        from dovetail_rewards.models.step_model import steps_of

        config, probabilities_S, sample = self.config, np.array(logit, np.float64), text.sample
        if not np.isfinite(probabilities_S).all():
            message = f"the probability of a step of sample {sample.sample_id} is {math.nan}; expected a finite number"
            return model_failure(FailureKind.INVALID_VALUE, message)
        scores_S = RUNNING[config.aggregate](probabilities_S)
        answer: dict[str, Any] = {
            "score": float(scores_S[-1]),
            "steps": len(scores_S),
            "step_min": float(probabilities_S.min()),
            "step_mean": float(probabilities_S.mean()),
            "step_last": float(probabilities_S[-1]),
            "step_probabilities": probabilities_S.tolist(),
        }
        if config.rewards == "steps" and sample.completion is not None:
            if self.context.tokenizer is None:
                return model_failure(
                    FailureKind.EXCEPTION,
                    "rewards=steps needs the policy's tokenizer, which a manager in a worker process does not have; set rewards=outcome",
                )
            ends = [last for _, last in steps_of(sample.text, config.step_separator)]
            rewards_S = np.diff(scores_S, prepend=0.0)
            tokens = token_rewards(sample, ends, rewards_S, self.context.tokenizer)
            answer["token_rewards"] = tokens
            answer["score"] = float(tokens.sum(dtype=np.float64))
        return outcome_from(answer, f"process reward model {config.model}")


def token_rewards(
    sample: Sample, ends: Sequence[int], rewards_S: np.ndarray, tokenizer: Tokenizer
) -> np.ndarray:
    """Return a reward for each response token, float32 [T]: the step's reward at a step's last token, else 0.

    Args:
        sample: a sample with its completion.
        ends: the end of each step in the sample's text, in characters.
        rewards_S: float64 [S], the steps' rewards.
        tokenizer: the tokenizer of the policy.
    """
    ids = sample.response_ids
    rewards_T = np.zeros(len(ids), np.float32)
    first = 0
    for end, reward in zip(ends, rewards_S, strict=True):
        # Find by bisection the first token at which the decoded text reaches the step's end; more tokens never decode to less text.
        low, high = first, max(len(ids) - 1, 0)
        while low < high:
            middle = (low + high) // 2
            text = tokenizer.decode(ids[: middle + 1], skip_special_tokens=True)
            low, high = (low, middle) if len(text) >= end else (middle + 1, high)
        if len(ids):
            rewards_T[low] += reward
        first = low
    return rewards_T
