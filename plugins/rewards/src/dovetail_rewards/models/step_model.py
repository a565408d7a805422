"""Input and output of a process reward model: the steps of a response as tokens, and the probability that each is right.

Legend: B texts of a forward pass, L padded length, S judged steps of all texts, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import ConfigError, RewardError
from dovetail.interfaces import Sample, Tokenizer
from dovetail_datasets import Marked
from dovetail_rewards.model_config import ProcessRewardModelConfig
from dovetail_rewards.models.classifier import ScoringModel, load_scoring_model
from dovetail_rewards.models.reading import Reader, Reading, plain_text
from dovetail_rollouts import conversation_ids

Span = tuple[int, int]
"""The start and the end of a step in a response, in characters."""


def steps_of(text: str, separator: str) -> list[Span]:
    """Return the character range (begin, end) of each step of a response; a response of white space only is a single step."""
    spans, at = [], 0
    for part in text.split(separator):
        if part.strip():
            spans.append((at, at + len(part)))
        at += len(part) + len(separator)
    return spans or [(0, len(text))]


class StepReader(Reader):
    """Turns prompts and responses into a model's tokens, with the step token after each step; thread-safe.

    Args:
        config: the model's config, with the form of the texts and the step token.
        tokenizer: the model's own tokenizer.
        limit: the model's token limit; None for no limit.

    Raises:
        ConfigError: `format` is `chat` and there is no chat template, or the step token's text has no token or ends with an unknown one.
    """

    without_chat = "format=plain for a model that reads plain text"

    def __init__(
        self, config: ProcessRewardModelConfig, tokenizer: Tokenizer, limit: int | None
    ) -> None:
        super().__init__(config, tokenizer, limit)
        self._mark = last_token(tokenizer, config.step_token, "step_token")

    def read(self, sample: Sample) -> Reading:
        """Return the tokens of a sample's prompt and response, and the positions of the step tokens.

        Raises:
            RewardError: there are more tokens than the model's limit, or the numbers of step tokens and steps differ, for example because
                the response contains the step token's text.
        """
        config, spans = self._config, steps_of(sample.text, self._config.step_separator)
        marked = Marked(
            config.step_join.join(
                self._encoder.given(sample.text[first:last]) + config.step_token
                for first, last in spans
            )
        )
        with self._lock:
            ids = (
                conversation_ids(self._encoder, sample.prompt.raw, marked)
                if config.format == "chat"
                else self._plain(sample, marked)
            )
        places = tuple(place for place, token in enumerate(ids) if token == self._mark)
        if len(places) != len(spans):
            raise RewardError(
                f"the tokens of sample {sample.sample_id} (prompt and response) contain the step token {config.step_token!r} {len(places)} time(s); "
                f"expected {len(spans)}, one for each step",
                hint="choose a step_token that is a single token and appears in no prompt or response",
            )
        if self._limit is not None and len(ids) > self._limit:
            raise self._too_long(sample, len(ids))
        return Reading(ids=tuple(ids), steps=places)

    def _plain(self, sample: Sample, marked: str) -> list[int]:
        text = f"{self._encoder.given(plain_text(sample.prompt.raw))} {marked}"
        how = {"add_special_tokens": True, "truncation": False, "verbose": False}
        [found] = self._encoder.encodings([text], **how)
        return list(found["input_ids"])


class StepClassifier(ScoringModel[list[float]]):
    """A model that gives the probability that each step is right: a token classifier, or custom code behind `AutoModel`.

    Raises:
        ConfigError: the model can't be loaded, has more than two labels, or its checkpoint lacks weights.
    """

    def __init__(self, config: ProcessRewardModelConfig) -> None:
        from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

        auto: Any = AutoModelForTokenClassification
        if config.trust_remote_code:
            # Qwen2.5-Math-PRM registers its class under AutoModel only.
            described = AutoConfig.from_pretrained(
                config.model, revision=config.revision, trust_remote_code=True
            )
            if "AutoModel" in (getattr(described, "auto_map", None) or {}):
                auto = AutoModel
        super().__init__(config, load_scoring_model(config, auto, "token", labels=(1, 2)))

    def found(self, inputs: dict[str, Tensor], readings: Sequence[Reading]) -> list[list[float]]:
        found = self._model(**inputs)
        logits_BLK = found.logits if hasattr(found, "logits") else found[0]
        logits_SK = logits_BLK[_places(readings, logits_BLK.device)].float()
        if logits_SK.shape[1] == 1:
            return _by_text(logits_SK[:, 0].sigmoid(), readings)
        return _by_text(logits_SK.softmax(1)[:, 1], readings)


class StepLanguageModel(ScoringModel[list[float]]):
    """A causal language model that scores the steps of a response (arXiv 2312.08935).

    A step's score is p(right) / (p(right) + p(wrong)), with the model's probabilities of the token for right and the token for wrong.

    Args:
        config: the config, with the model and the tokens for right and wrong.
        tokenizer: the model's own tokenizer.

    Raises:
        ConfigError: the model can't be loaded, its checkpoint lacks weights, or a configured text has no token.
    """

    def __init__(self, config: ProcessRewardModelConfig, tokenizer: Tokenizer) -> None:
        from transformers import AutoModelForCausalLM

        self._tokens = [
            last_token(tokenizer, text, key)
            for key, text in (("negative", config.negative), ("positive", config.positive))
        ]
        super().__init__(config, load_scoring_model(config, AutoModelForCausalLM, "token"))

    def found(self, inputs: dict[str, Tensor], readings: Sequence[Reading]) -> list[list[float]]:
        # Apply the output layer to the judged positions only: the logits of all tokens would be the pass's largest tensor.
        hidden_BLH = self._model.base_model(**inputs).last_hidden_state
        hidden_SH = hidden_BLH[_places(readings, hidden_BLH.device)]
        logits_S2 = self._model.get_output_embeddings()(hidden_SH)[:, self._tokens].float()
        return _by_text(logits_S2.softmax(1)[:, 1], readings)


def last_token(tokenizer: Tokenizer, text: str, key: str) -> int:
    """Return the id of the last token of a text.

    Raises:
        ConfigError: the text has no token, or its last token is unknown.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids or ids[-1] == tokenizer.unk_token_id:
        raise ConfigError(
            f"{key}={text!r} is not a token of the process reward model's tokenizer",
            hint=f"set {key} to the token with which the model was trained",
        )
    return int(ids[-1])


def _places(readings: Sequence[Reading], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for every judged step, the index of its text in the batch and the position of its step token, int64 [S] each."""
    rows = [row for row, reading in enumerate(readings) for _ in reading.steps]
    places = [place for reading in readings for place in reading.steps]
    return torch.tensor(rows, device=device), torch.tensor(places, device=device)


def _by_text(values_S: Tensor, readings: Sequence[Reading]) -> list[list[float]]:
    values = iter(values_S.tolist())
    return [[next(values) for _ in reading.steps] for reading in readings]
