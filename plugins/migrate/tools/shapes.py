"""Models of the shapes that verl's scripts name: their layers, heads, experts and positions, with heads of two features."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_HEAD = 2
# Name → layers, heads, key-value heads, positions, and experts.
_DENSE: tuple[tuple[str, tuple[int, int, int, int]], ...] = (
    (r"qwen2\.?5?-math-(7|8)b", (28, 28, 4, 4096)),
    (r"qwen2\.?5?-math-1\.5b", (28, 12, 2, 4096)),
    (r"qwen2.*0\.5b", (24, 14, 2, 32768)),
    (r"qwen2.*1\.5b", (28, 12, 2, 32768)),
    (r"qwen2.*[^\d]3b", (36, 16, 2, 32768)),
    (r"qwen2.*7b|openr1|eurus", (28, 28, 4, 32768)),
    (r"qwen2.*14b", (48, 40, 8, 32768)),
    (r"qwen2.*32b|seed-?oss", (64, 40, 8, 131072)),
    (r"qwen2.*72b", (80, 64, 8, 32768)),
    (r"qwen3.*0\.6b", (28, 16, 8, 40960)),
    (r"qwen3.*1\.7b", (28, 16, 8, 40960)),
    (r"qwen3.*[^\d]2b", (28, 16, 8, 262144)),
    (r"qwen3.*4b", (36, 32, 8, 262144)),
    (r"qwen3.*8b", (36, 32, 8, 40960)),
    (r"qwen3.*14b", (40, 40, 8, 40960)),
    (r"qwen3.*(32|27)b", (64, 64, 8, 40960)),
    (r"deepseek-(llm|coder)", (32, 32, 32, 16384)),
    (r"gemma.*2b", (18, 8, 4, 8192)),
)
_EXPERTS = r"a\d+b|moe|deepseek-?v|moonlight|kimi|glm-?(4\.5|5)|gpt-?oss|minimax|mixtral|air|nemotron|ling|next|hy-?_?v|hunyuan"
_MIXTURES: tuple[tuple[str, tuple[int, int, int, int, int]], ...] = (
    (r"deepseek-?v|kimi|glm-?5|moonlight", (48, 64, 64, 163840, 128)),
    (r"nemotron|hy-?_?v", (48, 32, 8, 262144, 128)),
    (r"235b|397b", (94, 64, 4, 262144, 128)),
    (r"30b|35b", (48, 32, 4, 262144, 128)),
    (r"gpt-?oss", (24, 64, 8, 131072, 32)),
)


def make_model(name: str, tokenizer: Path, folder: Path, *, experts: bool = False) -> Path:
    """Write a model directory with the shape of the model `name`; unknown names get that of Qwen3-8B or of a mixture of 128 experts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name = f"{name}-moe" if experts and not re.search(_EXPERTS, name.lower()) else name
    target = folder / re.sub(r"\W+", "_", name)
    if target.exists():
        return target
    target.mkdir(parents=True)
    for file in tokenizer.iterdir():
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            (target / file.name).write_bytes(file.read_bytes())
    kind, shape = _shape(name.lower())
    config = AutoConfig.for_model(
        kind, vocab_size=103, eos_token_id=1, pad_token_id=0, dtype="bfloat16", **shape
    )
    config.architectures = [
        {
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
        }[kind]
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
    return target


def _shape(name: str) -> tuple[str, dict[str, Any]]:
    if re.search(_EXPERTS, name):
        layers, heads, kv, positions, experts = next(
            (shape for pattern, shape in _MIXTURES if re.search(pattern, name)), _MIXTURES[1][1]
        )
        more = {
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 8,
            "intermediate_size": 64,
        }
        return "qwen3_moe", _sizes(layers, heads, kv, positions) | more
    found = next((shape for pattern, shape in _DENSE if re.search(pattern, name)), _DENSE[13][1])
    layers, heads, kv, positions = found
    kind = "qwen3" if "qwen3" in name else "qwen2"
    return kind, _sizes(layers, heads, kv, positions) | {"intermediate_size": 64}


def _sizes(layers: int, heads: int, kv: int, positions: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": heads * _HEAD,
        "head_dim": _HEAD,
        "max_position_embeddings": positions,
    }
