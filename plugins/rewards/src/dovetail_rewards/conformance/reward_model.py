"""Conformance suites of the reward models, on tiny random classifiers; scores are compared with those of transformers."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForSequenceClassification as Classifier,
    Qwen2ForTokenClassification as StepClassifier,
)

from dovetail.interfaces import Tokenizer
from dovetail_rewards.model_config import ProcessRewardModelConfig, RewardModelConfig
from dovetail_rewards.models.process_reward_model import ProcessRewardModelManager
from dovetail_rewards.models.reward_model import RewardModelManager
from dovetail_sdk.testing.conformance import RewardManagerConformance
from dovetail_sdk.testing.tiny import tiny_tokenizer

_CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


@functools.cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder that exists as long as the process."""
    return tempfile.TemporaryDirectory(prefix="dovetail-reward-model-")


@functools.cache
def tiny_classifier(pad: int | None = None) -> Path:
    """Return the directory of a random one-label Qwen2 with tokenizer and chat template; `pad` is the padding token's id."""
    where = Path(_kept().name) / f"padded with {pad}"
    where.mkdir()
    tokenizer = tiny_tokenizer(where, vocab_size=300)
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(where)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=pad,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Classifier(config).save_pretrained(where)
    return where


@functools.cache
def plain_score(prompt: str, response: str) -> float:
    """Return the score of one conversation as transformers computes it."""
    where = tiny_classifier()
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(where)
    model: Any = AutoModelForSequenceClassification.from_pretrained(where, dtype=torch.float32)
    ids = tokenizer(f"<user>{prompt}\n<assistant>{response}\n", add_special_tokens=False)
    with torch.no_grad():
        return float(model.eval()(input_ids=torch.tensor([ids["input_ids"]])).logits[0, 0])


class TestRewardModel(RewardManagerConformance):
    """Conformance suite of the reward manager `reward_model`, whose scores are compared with transformers' own."""

    plugin = RewardModelManager
    fails_on_demand = False
    tolerance = 1e-4

    def make_config(self) -> Any:
        model = str(tiny_classifier())
        return RewardModelConfig(
            name="reward_model", model=model, dtype="float32", device="cpu", wait_ms=2.0
        )

    def expected(self, value: float) -> float:
        return plain_score("2 + 2 =", "4" if value else "5")


@functools.cache
def tiny_step_classifier() -> Path:
    """Return the directory of a random Qwen2 that classifies tokens into two labels, with the tokenizer of `tiny_classifier`."""
    where = Path(_kept().name) / "steps"
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    tokenizer.save_pretrained(where)
    config = Qwen2Config.from_pretrained(tiny_classifier(), id2label={0: "wrong", 1: "right"})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        StepClassifier(config).save_pretrained(where)
    return where


@functools.cache
def plain_step_score(prompt: str, response: str) -> float:
    """Return the score of a one-step response as transformers computes it."""
    where = tiny_step_classifier()
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(where)
    model: Any = AutoModelForTokenClassification.from_pretrained(where, dtype=torch.float32)
    ids = tokenizer(f"<user>{prompt}\n<assistant>{response}#", add_special_tokens=False)
    with torch.no_grad():
        logits_LK = model.eval()(input_ids=torch.tensor([ids["input_ids"]])).logits[0]
    return float(logits_LK[-1].softmax(0)[1])


class TestProcessRewardModel(RewardManagerConformance):
    """Conformance suite of the process reward model: responses of one reasoning step, compared with transformers' own probabilities."""

    plugin = ProcessRewardModelManager
    fails_on_demand = False
    tolerance = 1e-4

    def make_config(self) -> Any:
        return ProcessRewardModelConfig(
            name="process_reward_model",
            model=str(tiny_step_classifier()),
            dtype="float32",
            device="cpu",
            wait_ms=2.0,
            step_token="#",  # noqa: S106 - a token of a language model
        )

    def expected(self, value: float) -> float:
        return plain_step_score("2 + 2 =", "4" if value else "5")
