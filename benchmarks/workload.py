"""The fixed workload of the step benchmark: model, tokenizer, prompts and reward that every system runs, in its own environment."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
"""Qwen2's config, in float32: 1.05 million parameters."""
PROMPTS = 16
RESPONSES = 8
PROMPT_TOKENS = 16
NEW_TOKENS = 32
LEARNING_RATE = 1e-4
STEPS = 20
WARM_UP_STEPS = 3
"""First steps, which allocate and compile, are left out of the medians."""
TOKENS_PER_STEP = PROMPTS * RESPONSES * (PROMPT_TOKENS + NEW_TOKENS)
WORDS = [f"w{number:03d}" for number in range(MODEL["vocab_size"])]
"""The vocabulary: one token a word. The first four stand for padding, the ends of a text and the unknown."""
PAD, EOS, BOS, UNKNOWN = WORDS[:4]


def prompts(seed: int) -> list[str]:
    """A prompt of exactly `PROMPT_TOKENS` words for every row of every step."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS[4:], k=PROMPT_TOKENS)) for _ in range(PROMPTS * STEPS)]


def word_tokenizer() -> Any:
    """A transformers tokenizer with one token a word, so that texts have exactly as many tokens as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        padding_side="left",
    )


def reward(response: str) -> float:
    """The share of words with an even number: cheap, and different for almost every response."""
    words = response.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


def compute_score(
    data_source: str | None,  # noqa: ARG001 - the signature of a reward file
    solution_str: str,
    ground_truth: Any,  # noqa: ARG001
    extra_info: Mapping[str, Any] | None = None,  # noqa: ARG001
) -> float:
    """The same reward, as a user's reward file gives it."""
    return reward(solution_str)
