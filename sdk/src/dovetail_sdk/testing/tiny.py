"""Tiny models and tokenizers in Hugging Face format, made when needed: real code paths without a model hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS, TURN, UNKNOWN = "<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>", "<|unk|>"
_SPECIAL = (PAD, BOS, EOS, TURN, UNKNOWN)
_BEGIN, _END = "<s>", "</s>"
_BYTES = 256
_WRITTEN_SPECIAL = re.compile(
    r"<[|｜][^<>|｜{}' \n]+[|｜]?>|<[^<>|｜{}' \n]+[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]"
)
"""A pattern that finds special tokens in the source of a chat template, such as `<|im_end|>` or `[INST]`."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "system user assistant\n",
    "What is the sum of these numbers? Answer with the final number only.",
    "Let us think step by step, and then give the answer after ####.",
    "The answer is 42. The result of the question is the number below.",
    "Janet has three apples and buys two more; how many apples does she have in total?",
    "Add, subtract, multiply and divide: first the product, then the difference.",
    "Question: how many are there? Answer: there are five of them in the box.",
)


def tiny_tokenizer(directory: Path, *, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Make a tokenizer with exactly `vocab_size` tokens, a ChatML template, and bos, eos and pad tokens.

    The tokenizer is byte-level BPE: it encodes any text, with one token per digit. Every id decodes to some text.

    Args:
        directory: the directory to save to; created if missing.
        vocab_size: the number of tokens, special ones included; at least 261.

    Raises:
        ModelError: `vocab_size` is below 261.
    """
    from transformers import PreTrainedTokenizerFast

    least = _BYTES + len(_SPECIAL)
    if vocab_size < least:
        raise ModelError(f"vocab_size is {vocab_size}; expected at least {least}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(vocab_size),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def template_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes with this chat template and the special tokens that occur in the template.

    Args:
        template: a Jinja template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=_BEGIN,
        eos_token=_END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    written = sorted(set(_WRITTEN_SPECIAL.findall(template)))
    tokenizer.add_special_tokens({"additional_special_tokens": written})
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    architecture: str = "qwen2",
    dtype: str = "float32",
    tie_word_embeddings: bool = True,
    head: Literal["lm", "value"] = "lm",
) -> PreTrainedModel:
    """Make a causal language model with random weights whose vocabulary is the tokenizer's.

    Args:
        directory: the directory of config and safetensors; created if missing.
        tokenizer: determines vocabulary size and the ids of special tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        layers: number of transformer blocks.
        heads: number of query heads; divides `hidden_size`.
        kv_heads: number of key and value heads; divides `heads`.
        seed: the seed of the weights; torch's own random state is left as it was.
        architecture: `qwen2`, `qwen3` or `llama`.
        dtype: torch dtype without the prefix, such as `float32`.
        tie_word_embeddings: whether the output layer is the embedding.
        head: `value` makes a token classifier with one label instead: a critic's checkpoint.

    Raises:
        ModelError: the architecture is unknown.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForTokenClassification,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
    )

    configs = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    if architecture not in configs:
        raise ModelError(
            f"unknown tiny architecture {architecture!r}; expected one of {', '.join(sorted(configs))}"
        )
    extra: dict[str, Any] = {"head_dim": hidden_size // heads} if architecture == "qwen3" else {}
    if head == "value":
        extra |= {"id2label": {0: "value"}, "label2id": {"value": 0}}
    config = configs[architecture](
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        family = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
        model = family.from_config(config, dtype=getattr(torch, dtype))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(directory))
    return model.eval()


def tiny_model_and_tokenizer(directory: Path, *, vocab_size: int = 512, **model: Any) -> Path:
    """Write a tiny tokenizer and a model for it into one directory, and return the directory.

    Args:
        directory: the directory of the tokenizer and the model.
        vocab_size: see `tiny_tokenizer`.
        **model: keyword arguments of `tiny_model`.
    """
    tiny_model(directory, tiny_tokenizer(directory, vocab_size=vocab_size), **model)
    return directory


def _byte_level(vocab_size: int) -> Tokenizer:
    """Make a byte-level BPE tokenizer, with reserved tokens if the small corpus has too few merges."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(_SPECIAL),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 4, trainer)
    missing = vocab_size - backend.get_vocab_size()
    backend.add_tokens([f"<|reserved_{index}|>" for index in range(missing)])
    return backend
