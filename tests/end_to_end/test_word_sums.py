"""The example `examples/word_sums`: its data, and that its config is one."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "word_sums"


def test_numbers_are_written_as_in_english() -> None:
    in_words = runpy.run_path(str(EXAMPLE / "prepare.py"))["in_words"]
    assert [in_words(n) for n in (0, 13, 20, 41, 99)] == ["zero", "thirteen", "twenty", "forty-one", "ninety-nine"]  # fmt: skip
    assert len({in_words(n) for n in range(100)}) == 100


def test_no_held_out_sum_is_trained_on(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLE / "prepare.py"))["prepare"](tmp_path)
    train, val = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "val.jsonl")
    )

    def numbers(row: dict[str, object]) -> frozenset[str]:
        return frozenset(row["prompt"][0]["content"].split("?")[0].split()[2::2])  # type: ignore[index]

    assert (len(train), len(val)) == (4750, 200)
    assert not set(map(numbers, train)) & set(map(numbers, val))


@pytest.mark.parametrize("override", [(), ("rollout.name=vllm",)], ids=["hf", "vllm"])
def test_its_config_is_valid(override: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, ["check", "--static", str(EXAMPLE / "config.yaml"), *override])
    assert done.exit_code == 0, done.output
