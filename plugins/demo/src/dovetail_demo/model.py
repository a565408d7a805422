"""A Qwen2 tokenizer with one token a character, and a tiny Qwen2 with random weights, both in Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
HASHES = ("##", "####")
"""The only tokens of more than one character: `####`, which marks the answer, and `##`, two of which are merged into `####`."""
CHARACTERS = "".join(map(chr, range(ord("!"), ord("~") + 1))) + "ĠĊ"
"""ASCII, each character a token; Ġ and Ċ are how byte-level tokenizers write the blank and the end of line."""

# A turn is its role, its text and the end token: <|user|>37+48=?<|end|><|assistant|>
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

HIDDEN_SIZE = 128
"""Hidden size of the demo's model, which has half a million parameters."""
WEIGHT_SCALE = 0.06
"""Standard deviation of the initial weights. The usual 0.02 suits much wider models: with it, this model would
need twice as many steps to leave the initial plateau of training."""


def make_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Write a tokenizer with the rules that transformers applies to every Qwen2 model, and a vocabulary of single characters."""
    from transformers import Qwen2Tokenizer

    tokens = (PAD, END, *ROLES, *HASHES, *CHARACTERS)
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[("#", "#"), ("##", "##")],
        eos_token=END,
        pad_token=PAD,
        unk_token=None,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def make_model(
    directory: Path, tokenizer: PreTrainedTokenizerBase, seed: int, hidden_size: int = HIDDEN_SIZE
) -> PreTrainedModel:
    """Write an untrained Qwen2 with `hidden_size` features, four heads, and the tokenizer's vocabulary."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=WEIGHT_SCALE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen2ForCausalLM(config)
    model.save_pretrained(str(directory))
    return model


def make_base(directory: Path, seed: int, hidden_size: int = HIDDEN_SIZE) -> Path:
    """Write tokenizer and untrained model into one directory, and return the directory."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    make_model(directory, make_tokenizer(directory), seed, hidden_size)
    return directory
