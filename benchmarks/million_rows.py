"""Times the commands of supervised fine-tuning on a file of many conversations, and how much memory they take.

    python benchmarks/million_rows.py --directory /tmp/m --rows 1000000

It writes a model of random weights with a tokenizer of byte pairs, and a JSONL file of conversations of six turns, which are sentences of
random words. Then it runs `dovetail check`, and trains one step, twice: the second start finds what the first has put into the cache.
`--cache whole` fills it in between, with `data.streaming=false`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dovetail_sdk.testing.tiny import tiny_model

CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Make what is missing, and run the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--cache", choices=("streamed", "whole"), default="streamed")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    file = given.directory / f"{given.rows}.jsonl"
    if not file.is_file():
        _write(file, given.rows)
    model = given.directory / "model"
    if not (model / "config.json").is_file():
        _make_model(model, file)
    print(f"{file}: {file.stat().st_size / 1e6:,.0f} MB")
    settings = [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train_files={file}",
        "data.train_batch_size=64",
        "trainer.name=supervised",
        "actor.objective=nll",
        "trainer.total_steps=1",
        "trainer.save_last=false",
        "trainer.export=none",
        f"output_dir={given.directory / 'runs'}",
    ]
    os.environ["DOVETAIL_CACHE"] = str(given.directory / "cache")
    _timed("check", ["check", *settings])
    _timed("first start", ["train", *settings, "experiment=first"])
    if given.cache == "whole":
        whole = [*settings, "data.streaming=false"]
        _timed("all into the cache", ["check", *whole])
        _timed("start without streaming", ["train", *whole, "experiment=whole"])
    _timed("check again", ["check", *settings])
    _timed("second start", ["train", *settings, "experiment=second"])


def _sentences() -> Iterator[str]:
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = [
        "".join(draw.choices(letters, range(26, 0, -1), k=draw.randint(2, 9))) for _ in range(9999)
    ]
    while True:
        yield " ".join(draw.choices(words, k=draw.randint(20, 60))).capitalize() + "."


def _write(file: Path, rows: int) -> None:
    said = _sentences()
    roles = ("user", "assistant") * 3
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(rows):
            messages = [{"role": role, "content": next(said)} for role in roles]
            lines.write(json.dumps({"messages": messages}) + "\n")


def _make_model(directory: Path, file: Path) -> None:
    with file.open(encoding="utf-8") as lines:
        texts = [next(lines) for _ in range(200)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, initial_alphabet=alphabet
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": special[1], "pad_token": special[2]})
    tokenizer.chat_template = CHAT_ML
    tokenizer.save_pretrained(directory)
    tiny_model(directory, tokenizer)


def _timed(what: str, command: list[str]) -> None:
    """Run a command of dovetail; print its time, that of all its processors, and the most memory that it and its children had at once."""
    began = time.perf_counter()
    process = psutil.Popen([sys.executable, "-m", "dovetail", *command], stdout=subprocess.DEVNULL)
    most = [0, 0.0]

    def watch() -> None:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            try:
                family = [process, *process.children(recursive=True)]
                most[0] = max(most[0], sum(one.memory_full_info().uss for one in family))
            except psutil.Error:
                pass
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = os.times()
    code = process.wait()
    after = os.times()
    watcher.join()
    processors = sum(after[2:4]) - sum(before[2:4])
    took = time.perf_counter() - began
    print(
        f"{what}: {took:.0f} s, {processors:.0f} processor seconds, {most[0] / 1e6:,.0f} MB",
        flush=True,
    )
    if code:
        raise SystemExit(f"{what} ended with {code}")


if __name__ == "__main__":
    main()
