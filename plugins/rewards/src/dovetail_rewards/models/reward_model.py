"""The reward manager `reward_model`: a discriminative reward model in this process, which scores samples while others are generated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from dovetail.errors import ConfigError, RewardError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginConfig,
    PluginContext,
    RewardManager,
    RunningTime,
    Sample,
)
from dovetail_rewards.managers.collector import BatchQueue
from dovetail_rewards.managers.threads import DaemonThreads, HungCalls
from dovetail_rewards.model_config import RewardModelConfig, ScoringModelConfig
from dovetail_rewards.models.reading import Reader, Reading
from dovetail_rollouts import outcome_from

if TYPE_CHECKING:
    from dovetail_rewards.models.classifier import ScoringModel

_HUNG = 2
"""Maximum number of forward passes that timed out and still run."""
_NO_LIMIT = 1 << 40
"""Number of tokens above which a tokenizer's maximum length means no limit; transformers sets 10³⁰ in that case."""


@attrs.frozen(kw_only=True, eq=False)
class ModelText:
    """A sample with its tokens for the reward model."""

    sample: Sample
    reading: Reading


class RewardModelManager(RewardManager):
    """Scores single samples by one forward pass of a sequence classifier over prompt and response.

    score = clip((logit − mean) / std); the components are `logit` and, if texts may be truncated, `truncated`.

    Samples are batched within a token budget while other samples are still generated. A sample fails if its text is too long, its logit is
    not finite, or its forward pass fails.

    In a config:

        reward: {manager: {model: path/to/reward-model}}
    """

    name = "reward_model"
    api = ">=1.2,<2"
    capabilities = frozenset({"timeout", "sleep"})
    queues = True
    Config = RewardModelConfig

    def __init__(self, config: RewardModelConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._threads = DaemonThreads(HungCalls(_HUNG))
        self._model: Any = None
        self._reader: Any = None
        self._collector = BatchQueue[ModelText](
            self._score_batch,
            size=config.size,
            wait=config.wait_ms / 1000,
            calls=1,
            weigh=lambda text: len(text.reading.ids),
            budget=config.max_tokens_per_batch,
        )

    @classmethod
    def needs_functions(cls, config: PluginConfig) -> bool:
        return False

    def start(self) -> None:
        """Load the model and its tokenizer.

        Raises:
            ConfigError: model or tokenizer can't be loaded, or the model is not a reward model.
        """
        from dovetail_rewards.models.classifier import Classifier

        tokenizer = load_tokenizer(self.config)
        self._model = Classifier(self.config)
        self._reader = Reader(self.config, tokenizer, longest(self._model, tokenizer))

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        assert self._model is not None, "the reward manager is not started"
        return list(await asyncio.gather(*(self._score(s, time) for s in samples)))

    async def _score(self, sample: Sample, time: RunningTime) -> Outcome:
        try:
            reading = await self._threads.run(lambda: self._reader.read(sample))
        except RewardError as error:
            return model_failure(FailureKind.EXCEPTION, str(error))
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything
            what = f"{type(error).__name__}: {error}"
            return model_failure(
                FailureKind.EXCEPTION, f"sample {sample.sample_id} can't be tokenized: {what}"
            )
        text = ModelText(sample=sample, reading=reading)
        return await self._collector.submit(text, time)

    async def _score_batch(self, texts: Sequence[ModelText]) -> list[Outcome]:
        readings = [text.reading for text in texts]
        try:
            logits = await self._threads.run(lambda: self._model.score(readings))
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
            what = f"{type(error).__name__}: {str(error)[:300]}"
            return [
                model_failure(FailureKind.CRASH, f"the forward pass failed: {what}", True)
            ] * len(texts)
        return [self.judge(text, logit) for text, logit in zip(texts, logits, strict=True)]

    def judge(self, text: ModelText, logit: Any) -> Outcome:
        """Return the score or failure of a text from the model's logit."""
        config = self.config
        if not math.isfinite(logit):
            message = (
                f"the logit of sample {text.sample.sample_id} is {logit}; expected a finite number"
            )
            return model_failure(FailureKind.INVALID_VALUE, message)
        score = (logit - config.mean) / config.std
        if config.clip is not None:
            score = min(max(score, -config.clip), config.clip)
        answer = {"score": score, "logit": logit}
        if config.overlong != "fail":
            answer["truncated"] = float(text.reading.truncated)
        return outcome_from(answer, f"reward model {config.model}")

    def sleep(self) -> None:
        if self._model is not None:
            self._model.sleep()

    def close(self) -> None:
        self._threads.close()
        self._model = self._reader = None


def load_tokenizer(config: ScoringModelConfig) -> Any:
    """Load the scoring model's tokenizer.

    Raises:
        ConfigError: the tokenizer can't be loaded.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer_path or config.model
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"the tokenizer of reward model {config.model!r} can't be loaded from {path!r}: {error}",
            hint="if the tokenizer lies elsewhere, set tokenizer_path",
        ) from error


def longest(model: ScoringModel[Any], tokenizer: Any) -> int | None:
    """Return the smaller of the token limits that the model and its tokenizer state; None if neither states one."""
    limits = [model.max_length, tokenizer.model_max_length]
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def model_failure(kind: FailureKind, message: str, retryable: bool = False) -> Failure:
    """Return the Failure of a sample that a model could not score."""
    return Failure(kind=kind, message=f"reward model: {message}", retryable=retryable)
