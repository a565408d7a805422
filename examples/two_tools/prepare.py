"""A shop whose prices only a search finds: questions, documents, demonstrations, and an untrained model.

`37 of 473?` asks what 37 pieces of item 473 cost. The policy has to search for the item's price, which is random, and
to have the product worked out by the calculator. Held-out questions are about items that no training question names.
Usage: `python examples/two_tools/prepare.py --out demo/two_tools`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from dovetail_demo.model import make_model, make_tokenizer

ITEMS = 800
HELD_OUT = 128
"""Held-out items, with one question each."""
QUESTIONS = 4
"""Questions for each of the other items."""
DEMONSTRATIONS = 150 * 64
"""Conversations of the warm start: 150 steps of 64."""
MADE_UP, ADDED = 0.6, 0.5
"""Share of the demonstrations that make up the price and do not search; and, of all, that add where they should multiply."""
TOKENS = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}')
WORDS = ("search", "query", "calculator", "expression", " costs ")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "calculator")]
# Tools by name, which is all that this model can use; a turn is its role, its text, its calls and the end token.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tool_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Write the demo's tokenizer, a token a character, with tokens for the parts of a call, as Qwen's has."""
    tokenizer = make_tokenizer(directory)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*TOKENS, *WORDS)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]}, False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def question(pieces: int, item: str, price: int) -> dict[str, Any]:
    """One row of data, in the columns of `data.train_files`."""
    return {
        "prompt": [{"role": "user", "content": f"{pieces} of {item}?"}],
        "reward_model": {"ground_truth": str(pieces * price)},
    }


def call(name: str, argument: str, value: str) -> dict[str, Any]:
    """The assistant's turn that calls a tool."""
    function = {"name": name, "arguments": {argument: value}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def demonstration(pieces: int, item: str, price: int, rng: np.random.Generator) -> dict[str, Any]:
    """A conversation that searches or makes up the price, and multiplies or adds."""
    messages = [{"role": "user", "content": f"{pieces} of {item}?"}]
    if rng.random() < MADE_UP:
        price = int(rng.integers(11, 100))
    else:
        found = {"role": "tool", "content": f"[1] {item} costs {price}"}
        messages += [call("search", "query", item), found]
    adds = rng.random() < ADDED
    expression = f"{pieces}{'+' if adds else '*'}{price}"
    result = str(pieces + price if adds else pieces * price)
    messages += [
        call("calculator", "expression", expression),
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
    return {"messages": messages, "tools": TOOLS}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line for each row."""
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(lines)} rows")


def prepare(directory: Path, seed: int = 1) -> None:
    """Write `prices.jsonl`, `train.jsonl`, `val.jsonl`, `sft.jsonl` and the folder `base`."""
    rng = np.random.default_rng(seed)
    items = [f"{item:03}" for item in rng.permutation(1000)[:ITEMS]]
    prices = {item: int(rng.integers(11, 100)) for item in items}
    held_out, others = items[:HELD_OUT], items[HELD_OUT:]

    def asked(item: str) -> tuple[int, str, int]:
        return int(rng.integers(11, 100)), item, prices[item]

    base = directory / "base"
    base.mkdir(parents=True, exist_ok=True)
    write(directory / "prices.jsonl", ({"text": f"{i} costs {prices[i]}"} for i in items))
    write(directory / "val.jsonl", (question(*asked(item)) for item in held_out))
    rows = [question(*asked(item)) for item in others for _ in range(QUESTIONS)]
    write(directory / "train.jsonl", (rows[i] for i in rng.permutation(len(rows))))
    shown = (asked(others[int(rng.integers(len(others)))]) for _ in range(DEMONSTRATIONS))
    write(directory / "sft.jsonl", (demonstration(*one, rng) for one in shown))
    make_model(base, make_tool_tokenizer(base), seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo/two_tools"), help="directory")
    parser.add_argument("--seed", type=int, default=1, help="of data and weights")
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.seed)
